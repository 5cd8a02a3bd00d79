"""MT-Bench's answers, graded against a local endpoint: scores as FastChat's `show_result` computes them.

Of the published questions and answers where they are, and of made ones.
"""

import json
from pathlib import Path

import pytest

from mlflow_compress.items.sources.instructions import Instruction, find_instructions
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.metrics import MetricInputs, compute_all
from mlflow_compress.records import Generations, Judgments, RunRecords
from tests.judge_server import FaultyJudge
from tests.judging import Instruction as Made
from tests.judging import answers as made_answers
from tests.judging import graded
from tests.roundoff import of_sum
from tests.shared_data import SHARED, needs_shared

MODELS = {"baseline": "llama-2-13b-chat", "variant": "llama-2-7b-chat"}


def published(who: str) -> Generations:
    """Return the published answers of a model, from FastChat's file."""
    rows = []
    for line in (SHARED / "data" / "mt_bench" / f"answers_{MODELS[who]}.jsonl").read_text().splitlines():
        row = json.loads(line)
        for turn, text in enumerate(row["choices"][0]["turns"]):
            key = {"task": "mt_bench", "item_id": str(row["question_id"]), "turn": turn, "sample": 0}
            rows.append({**key, "prompt": "", "text": text, "n_tokens": 1})
    return Generations.from_rows(rows)


def published_questions() -> list[Instruction]:
    settings = TaskSettings(data_dir=str(SHARED / "data"))
    return find_instructions("mt_bench", model="m", settings=settings)


def made_questions() -> list[Made]:
    """Return as many as MT-Bench has, two turns each: ten of every category, three of which have references."""
    plain = [(name, ()) for name in ("writing", "roleplay", "extraction", "stem", "humanities")]
    graded_by_reference = [(name, ("r0", "r1")) for name in ("math", "reasoning", "coding")]
    return [
        Made(f"{category}{i}", category, (f"First {i} of {category}.", "Second."), reference)
        for category, reference in plain + graded_by_reference
        for i in range(10)
    ]


def show_result(judgments: Judgments) -> dict[tuple[str, str], float]:
    """Return what FastChat's `show_result` (single mode) prints, by category too: means of the scores that are not -1.

    `df = df[df["score"] != -1]`, then the mean of turn 1, of turn 2, and of both turns.
    """
    df = judgments.table.to_pandas()
    df["score"] = df["score"].fillna(-1)
    df = df[df["score"] != -1]
    found = {}
    for category, part in [("", df), *df.groupby("category")]:
        found["judge/mt_bench_turn1", category] = part[part["turn"] == 0]["score"].mean()
        found["judge/mt_bench_turn2", category] = part[part["turn"] == 1]["score"].mean()
        found["judge/mt_bench", category] = part["score"].mean()
    return found


@pytest.mark.parametrize("texts", ["made", pytest.param("published", marks=needs_shared)])
def test_scores_by_category_are_those_of_show_result(texts: str, tmp_path: Path) -> None:
    items = made_questions() if texts == "made" else published_questions()
    answers = {who: made_answers(*items, by=who) if texts == "made" else published(who) for who in MODELS}
    assert len(items) == 80 and [len(part) for part in answers.values()] == [160, 160]
    # Faults that cost nothing pass; what stays unscored is left out by both.
    script = FaultyJudge(share=0.2)
    judged, _ = graded(script, tmp_path, *items, given=answers, judge_attempts=1, judge_max_unscored=1)
    assert 0 < judged.values["judge/unscored"] < 320
    found = compute_all(
        MetricInputs(
            baseline=RunRecords(judgments=judged.judgments["baseline"]),
            variant=RunRecords(judgments=judged.judgments["variant"]),
        )
    )
    ours = {(r.name, r.category or ""): r for r in found}
    expected = show_result(judged.judgments["variant"])
    assert len({category for _, category in expected}) == 9
    for key, value in expected.items():
        assert ours[key].value == pytest.approx(value, abs=of_sum(161, 10)), key  # the mean of 160 scores up to 10
    baseline = show_result(judged.judgments["baseline"])
    for category in {category for _, category in expected}:
        value = baseline["judge/mt_bench", category]
        assert ours["judge/mt_bench_baseline", category].value == pytest.approx(value, abs=of_sum(161, 10))
    scored = judged.judgments["variant"].table.column("score").null_count
    assert ours["judge/mt_bench", ""].n == 160 - scored and ours["judge/mt_bench", ""].n_unscored == scored
