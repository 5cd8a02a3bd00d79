"""Accuracy of the model and of its baseline, and the paired change with an exact test."""

from __future__ import annotations

from mlflow_compress.metrics.core.item_table import ANSWERED
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, Key, metric
from mlflow_compress.metrics.core.predictions import Predictions
from mlflow_compress.metrics.stats.intervals import paired_difference, wilson
from mlflow_compress.metrics.stats.significance import mcnemar_exact
from mlflow_compress.records import MetricResult


def _shares(evidence: MetricInputs, predictions: Predictions, name: str) -> list[MetricResult]:
    scored, correct = predictions.scored[:, 0], predictions.correct[:, 0]
    level = evidence.settings.level
    results = []
    for part in evidence.parts(ANSWERED, pooled=evidence.headline_families):
        n = int(scored[part.rows].sum())
        if n:
            right = int(correct[part.rows].sum())
            interval = wilson(right, n, level=level)
            results.append(part.result(name, right / n, interval, n=n, level=level, n_unscored=len(part.rows) - n))
    return results


@METRICS.register("accuracy")
@metric(
    keys=(
        Key(
            name="quality/accuracy",
            direction="higher",
            low=0.0,
            high=1.0,
            unit="share",
            meaning="Share of scored items that the model has right, by each task's own rule; pooled over multiple "
            "choice, or over all items where none is.",
        ),
        Key(
            name="quality/accuracy_baseline",
            direction="neither",
            low=0.0,
            high=1.0,
            unit="share",
            meaning="The baseline's accuracy on the same items.",
        ),
    ),
    needs=("items", "predictions"),
    source="lm-evaluation-harness acc / acc_norm; unscored items are counted apart, not as wrong",
)
def accuracy(evidence: MetricInputs) -> list[MetricResult]:
    """``#correct / #scored``, pooled over the headline's items (micro-average), by task and by category."""
    results = _shares(evidence, evidence.subject_predictions, "quality/accuracy")
    if evidence.variant is not None:
        results += _shares(evidence, evidence.baseline_predictions, "quality/accuracy_baseline")
    return results


@METRICS.register("accuracy_delta")
@metric(
    keys=(
        Key(
            name="quality/accuracy_delta",
            direction="higher",
            low=-1.0,
            high=1.0,
            unit="share",
            meaning="Variant minus baseline accuracy on items that both answered; Tango's paired score interval.",
        ),
        Key(
            name="quality/mcnemar_p",
            direction="neither",
            low=0.0,
            high=1.0,
            unit="probability",
            meaning="Exact McNemar p-value of the accuracy change.",
        ),
    ),
    needs=("items", "variant", "predictions"),
    source="Accuracy is Not All You Need, section 2: (w2c - c2w)/N; McNemar 1947, exact; Tango 1998",
)
def accuracy_delta(evidence: MetricInputs) -> list[MetricResult]:
    """``(w2c - c2w)/N`` over items with a prediction of both models, with the exact McNemar p-value."""
    both = evidence.scored_by_both
    right_b, right_q = evidence.baseline_predictions.correct[:, 0], evidence.variant_predictions.correct[:, 0]
    level = evidence.settings.level
    results = []
    for part in evidence.parts(ANSWERED, pooled=evidence.headline_families):
        rows = part.rows[both[part.rows]]
        if not len(rows):
            continue
        n, left = len(rows), len(part.rows) - len(rows)
        c2w = int((right_b[rows] & ~right_q[rows]).sum())
        w2c = int((~right_b[rows] & right_q[rows]).sum())
        interval = paired_difference(w2c, c2w, n, level=level)
        results.append(
            part.result("quality/accuracy_delta", (w2c - c2w) / n, interval, n=n, level=level, n_unscored=left)
        )
        if part.category is None:
            p = mcnemar_exact(c2w, w2c)
            results.append(part.result("quality/mcnemar_p", p, n=n, level=level, n_unscored=left))
    return results
