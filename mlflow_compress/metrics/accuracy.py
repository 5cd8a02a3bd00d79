"""Accuracy of the model and of its baseline on the same items."""

from __future__ import annotations

from mlflow_compress.metrics.core.estimates import Estimates, Proportion, by_subset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, TOO_LONG, MetricKey, metric
from mlflow_compress.metrics.core.predictions import Predictions
from mlflow_compress.metrics.core.requirements import ITEMS, PREDICTIONS
from mlflow_compress.metrics.stats.arrays import Int
from mlflow_compress.records import MetricResult

ACCURACY = MetricKey.share(
    "quality/accuracy",
    "higher",
    "Share of scored items that the model has right, by each task's own rule; pooled over multiple "
    "choice, or over all items where none is.",
    label="Accuracy",
    headline=50,
    leaderboard=True,
    by_task=True,
    difference="quality/accuracy_delta",
    unscored=TOO_LONG,
)
BASELINE = MetricKey.share("quality/accuracy_baseline", "neither", "The baseline's accuracy on the same items.")


@METRICS.register("accuracy")
@metric(
    keys=(ACCURACY, BASELINE),
    requires=(ITEMS, PREDICTIONS),
    source="lm-evaluation-harness acc / acc_norm; unscored items are counted apart, not as wrong",
)
def accuracy(inputs: MetricInputs) -> list[MetricResult]:
    """``#correct / #scored``, pooled over the headline's items (micro-average), by task and by category."""
    results = _share_right(inputs, inputs.subject_predictions, ACCURACY)
    if inputs.variant is not None:
        results += _share_right(inputs, inputs.baseline_predictions, BASELINE)
    return results


def _share_right(inputs: MetricInputs, model: Predictions, key: MetricKey) -> list[MetricResult]:
    def share(rows: Int) -> Estimates:
        return {key: Proportion(int(model.correct[rows, 0].sum()), len(rows))}

    return by_subset(inputs, share, scored=model.scored[:, 0])
