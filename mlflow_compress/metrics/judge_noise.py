"""The judge's own noise: how far its grades of one and the same answer differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, MetricKey, metric
from mlflow_compress.metrics.core.requirements import JUDGE_REPEATS, rated_by
from mlflow_compress.metrics.judge_scores import by_judge_model
from mlflow_compress.records import Judgments, MetricResult


def _key(name: str, meaning: str) -> MetricKey:
    return MetricKey(
        name=f"judge/{name}",
        direction="neither",
        low=0.0,
        high=9.0,
        unit="points",
        meaning=meaning,
        by_task=True,
        by_category=False,
        counted="answers",
    )


SPREAD = _key("mt_bench_noise_sd", "Standard deviation of the judge's grades of one and the same answer.")
FLOOR = _key(
    "mt_bench_noise", "Standard deviation of the difference between two gradings of the same answers: the noise floor."
)


@METRICS.register("judge_noise")
@metric(
    keys=(SPREAD, FLOOR),
    requires=(rated_by("mt_bench"), JUDGE_REPEATS),
    source="Analysis of variance within answers, pooled over both models' answers",
)
def judge_noise(inputs: MetricInputs) -> list[MetricResult]:
    """The judge's noise, from answers with two readable grades or more; several judge models one by one.

    Within-answer variance: s^2 = sum_a sum_r (x_ar - mean_a)^2 / sum_a (r_a - 1). The mean of the N answers' mean
    grades then has the variance s^2 sum_a(1 / r_a) / N^2 from the judge alone, and the difference of two such means
    twice that.
    """
    subject = inputs.subject.judgments
    assert subject is not None and inputs.baseline.judgments is not None  # required
    baseline = by_judge_model(inputs.baseline.judgments) if inputs.variant is not None else {}
    results = []
    for model, judgments in by_judge_model(subject).items():
        groups = _grades(judgments)
        every = groups + (_grades(baseline[model]) if model in baseline else [])
        results += [replace(result, task=model or None) for result in _noise(groups, every)]
    return results


def _grades(judgments: Judgments) -> list[list[float]]:
    """Return the readable grades of each answer that has any."""
    found: dict[tuple[str, int], list[float]] = {}
    for row in judgments.table.to_pylist():
        if row["score"] is not None:
            found.setdefault((row["item_id"], row["turn"]), []).append(row["score"])
    return list(found.values())


def _noise(subject: list[list[float]], every: list[list[float]]) -> list[MetricResult]:
    repeated = [grades for grades in every if len(grades) > 1]
    freedom = sum(len(grades) - 1 for grades in repeated)
    if freedom == 0:
        return []
    variance = sum(float(np.var(grades)) * len(grades) for grades in repeated) / freedom
    of_mean = variance * sum(1 / len(grades) for grades in subject) / len(subject) ** 2
    return [
        MetricResult(name=SPREAD.name, value=float(np.sqrt(variance)), n=len(repeated)),
        MetricResult(name=FLOOR.name, value=float(np.sqrt(2 * of_mean)), n=len(subject)),
    ]
