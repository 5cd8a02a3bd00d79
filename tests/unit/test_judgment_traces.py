"""Judgments as MLflow traces: none is missing, none is there twice, and what was said is there word for word."""

from collections import Counter
from pathlib import Path

import mlflow
import pytest

from mlflow_compress.commands.judge.run import judged_answers
from mlflow_compress.errors import TrackingError
from mlflow_compress.items.sources.instructions import Instruction
from mlflow_compress.records import Generations, Judgments
from mlflow_compress.tracking.tracked_run import log_judged_answers
from mlflow_compress.tracking.tracker import Tracker

HOSTILE = "<script>alert(1)</script> ünïcode 日本 \x07 [[10]]"


def answers(n: int, by: str) -> Generations:
    """Return two turns of n answers."""
    rows = [
        {"item_id": f"i{i}", "turn": turn, "text": f"{by} {i} {turn} {HOSTILE}"} for i in range(n) for turn in (0, 1)
    ]
    return Generations.from_rows([{"task": "t", "sample": 0, "prompt": "", "n_tokens": 1, **row} for row in rows])


def judgments(n: int, repeats: int, *tasks: str) -> Judgments:
    """Return judgments of which every third is unscored."""
    rows = []
    for task in tasks:
        for place in range(2 * n * repeats):
            scored = place % 3 != 0
            row = {"task": task, "item_id": f"i{place // (2 * repeats)}", "turn": place // repeats % 2}
            row |= {"repeat": place % repeats, "category": "math", "score": float(place % 10 + 1) if scored else None}
            row |= {
                "reason": None if scored else "http_500",
                "judgment": f"said {place} {HOSTILE}",
                "judge": "gpt-4 single-v1",
            }
            rows.append(row)
    return Judgments.from_rows(rows)


def instructions(n: int) -> list[Instruction]:
    """Return n instructions of two turns."""
    return [Instruction(item_id=f"i{i}", category="math", turns=(f"Ask {i}.", "Again.")) for i in range(n)]


def test_every_judgment_is_one_assessment_of_one_trace_per_answer(tracker: Tracker) -> None:
    n = 60  # more answers than one call takes
    given = {"baseline": answers(n, "b"), "variant": answers(n, "v")}
    said = {"baseline": judgments(n, 1, "mt_bench"), "variant": judgments(n, 2, "mt_bench", "pairwise")}
    judged = judged_answers(instructions(n), given, said)
    with tracker.run("judge x", "judge", {}) as run:
        run.log_judged_answers(judged)
        traces = mlflow.search_traces(
            locations=[tracker.experiment_id], run_id=run.run_id, max_results=1000, return_type="list"
        )
    assert (
        len(traces)
        == 4 * n
        == len({(t.info.tags["model"], t.info.tags["item_id"], t.info.tags["turn"]) for t in traces})
    )
    assessments = [a for trace in traces for a in trace.info.assessments]
    assert len(assessments) == len(said["baseline"]) + len(said["variant"]) == 10 * n
    assert Counter(a.name for a in assessments) == {"mt_bench": 6 * n, "pairwise": 4 * n}
    wanted = [row for table in said.values() for row in table.table.to_pylist()]
    assert Counter(a.value for a in assessments) == Counter(row["score"] for row in wanted)
    assert Counter(a.rationale for a in assessments) == Counter(row["judgment"] for row in wanted)
    unscored = [a for a in assessments if a.value is None]
    assert len(unscored) == sum(row["score"] is None for row in wanted) > 0
    assert {a.error.error_code for a in unscored if a.error is not None} == {"http_500"}
    assert {a.source.source_id for a in assessments} == {"gpt-4 single-v1"}
    [second] = [
        t
        for t in traces
        if (t.info.tags["model"], t.info.tags["item_id"], t.info.tags["turn"]) == ("variant", "i7", "2")
    ]
    [span] = second.data.spans
    assert span.outputs == f"v 7 1 {HOSTILE}"
    assert [m["content"] for m in span.inputs["messages"]] == ["Ask 7.", f"v 7 0 {HOSTILE}", "Again."]
    assert second.info.trace_metadata["mlflow.sourceRun"] == run.run_id


def test_answers_without_a_judgment_are_no_traces() -> None:
    only = judgments(2, 1, "mt_bench").where(turn=0, item_id="i1")
    found = judged_answers(
        instructions(2), {"baseline": answers(2, "b"), "variant": answers(2, "v")}, {"baseline": None, "variant": only}
    )
    assert [(one.model, dict(one.tags)) for one in found] == [
        ("variant", {"item_id": "i1", "turn": "1", "category": "math"})
    ]


def test_a_store_that_refuses_is_one_clear_error(tracker: Tracker, tmp_path: Path) -> None:
    judged = judged_answers(instructions(1), {"variant": answers(1, "v")}, {"variant": judgments(1, 1, "mt_bench")})
    with pytest.raises(TrackingError, match="0 of 2 written"):
        log_judged_answers(tracker.uri, "123456", "0" * 32, judged)
