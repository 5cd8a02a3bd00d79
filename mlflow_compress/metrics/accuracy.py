"""Accuracy of the model and of its baseline, and the paired change with an exact test."""

from __future__ import annotations

from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, MetricKey, metric
from mlflow_compress.metrics.core.predictions import Predictions
from mlflow_compress.metrics.stats.intervals import paired_difference, wilson
from mlflow_compress.metrics.stats.significance import mcnemar_exact
from mlflow_compress.records import MetricResult


def _shares(inputs: MetricInputs, predictions: Predictions, name: str) -> list[MetricResult]:
    scored, correct = predictions.scored[:, 0], predictions.correct[:, 0]
    level = inputs.settings.level
    results = []
    for subset in inputs.subsets(inputs.view.graded, pooled=inputs.headline_families):
        n = int(scored[subset.rows].sum())
        if n:
            right = int(correct[subset.rows].sum())
            interval = wilson(right, n, level=level)
            results.append(subset.result(name, right / n, interval, n=n, level=level, n_unscored=len(subset.rows) - n))
    return results


@METRICS.register("accuracy")
@metric(
    keys=(
        MetricKey(
            name="quality/accuracy",
            direction="higher",
            low=0.0,
            high=1.0,
            unit="share",
            meaning="Share of scored items that the model has right, by each task's own rule; pooled over multiple "
            "choice, or over all items where none is.",
        ),
        MetricKey(
            name="quality/accuracy_baseline",
            direction="neither",
            low=0.0,
            high=1.0,
            unit="share",
            meaning="The baseline's accuracy on the same items.",
        ),
    ),
    requires=("items", "predictions"),
    source="lm-evaluation-harness acc / acc_norm; unscored items are counted apart, not as wrong",
)
def accuracy(inputs: MetricInputs) -> list[MetricResult]:
    """``#correct / #scored``, pooled over the headline's items (micro-average), by task and by category."""
    results = _shares(inputs, inputs.subject_predictions, "quality/accuracy")
    if inputs.variant is not None:
        results += _shares(inputs, inputs.baseline_predictions, "quality/accuracy_baseline")
    return results


@METRICS.register("accuracy_delta")
@metric(
    keys=(
        MetricKey(
            name="quality/accuracy_delta",
            direction="higher",
            low=-1.0,
            high=1.0,
            unit="share",
            meaning="Variant minus baseline accuracy on items that both answered; Tango's paired score interval.",
        ),
        MetricKey(
            name="quality/mcnemar_p",
            direction="neither",
            low=0.0,
            high=1.0,
            unit="probability",
            meaning="Exact McNemar p-value of the accuracy change.",
        ),
    ),
    requires=("items", "variant", "predictions"),
    source="Accuracy is Not All You Need, section 2: (w2c - c2w)/N; McNemar 1947, exact; Tango 1998",
)
def accuracy_delta(inputs: MetricInputs) -> list[MetricResult]:
    """``(w2c - c2w)/N`` over items with a prediction of both models, with the exact McNemar p-value."""
    both = inputs.scored_by_both
    right_b, right_q = inputs.baseline_predictions.correct[:, 0], inputs.variant_predictions.correct[:, 0]
    level = inputs.settings.level
    results = []
    for subset in inputs.subsets(inputs.view.graded, pooled=inputs.headline_families):
        rows = subset.rows[both[subset.rows]]
        if not len(rows):
            continue
        n, left = len(rows), len(subset.rows) - len(rows)
        c2w = int((right_b[rows] & ~right_q[rows]).sum())
        w2c = int((~right_b[rows] & right_q[rows]).sum())
        interval = paired_difference(w2c, c2w, n, level=level)
        results.append(
            subset.result("quality/accuracy_delta", (w2c - c2w) / n, interval, n=n, level=level, n_unscored=left)
        )
        if subset.category is None:
            p = mcnemar_exact(c2w, w2c)
            results.append(subset.result("quality/mcnemar_p", p, n=n, level=level, n_unscored=left))
    return results
