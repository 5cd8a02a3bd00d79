"""Several judge models and repeats through the judge, and the page's row of the noise floor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlflow_compress.metrics.core.metric_inputs import MetricInputs, compute_all, headline
from mlflow_compress.records import RunRecords
from mlflow_compress.reporting.headline import headline_rows
from tests.judge_server import judge_server
from tests.judging import answers, grade, instructions


def rating(number: int, body: dict[str, Any]) -> str:
    return f"[[{7 if body['model'] == 'a' else number % 3 + 4}]]"


def test_each_judge_model_is_asked_and_recorded_by_itself(tmp_path: Path) -> None:
    items = instructions(4)
    given = {"baseline": answers(*items), "variant": answers(*items, by="other")}
    with judge_server(rating) as server:
        judged = grade(server.base_url, tmp_path, *items, given=given, judge_model="a,b", judge_repeats=2)
    assert sorted(body["model"] for body in server.bodies) == ["a"] * 32 + ["b"] * 32
    assert judged.parameters["judge_model"] == "a,b" and judged.values["judge/calls"] == 64
    tasks = judged.judgments["variant"].table.column("task").to_pylist()
    assert sorted(set(tasks)) == ["mt_bench/a", "mt_bench/b"]
    found = compute_all(MetricInputs(**{who: RunRecords(judgments=part) for who, part in judged.judgments.items()}))
    by_task = {(r.name, r.task): r.value for r in found if r.category is None}
    assert by_task["judge/mt_bench", "a"] == 7 and by_task["judge/mt_bench_noise", "a"] == 0
    assert by_task["judge/mt_bench_noise", "b"] > 0


def test_the_noise_floor_stands_in_the_row_of_the_grade(tmp_path: Path) -> None:
    items = instructions(4)
    given = {"baseline": answers(*items), "variant": answers(*items, by="other")}
    with judge_server(rating) as server:
        judged = grade(server.base_url, tmp_path, *items, given=given, judge_model="b", judge_repeats=2)
    pooled = headline(
        compute_all(MetricInputs(**{who: RunRecords(judgments=part) for who, part in judged.judgments.items()}))
    )
    [row] = [row for row in headline_rows(pooled) if row.label == "MT-Bench"]
    assert row.noise is not None and float(row.noise) > 0
