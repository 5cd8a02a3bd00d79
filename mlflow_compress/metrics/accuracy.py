"""Accuracy of the model and of its baseline on the same items, and the paired change with an exact test."""

from mlflow_compress.metrics.core.estimates import Estimates, PairedDifference, Proportion, by_subset
from mlflow_compress.metrics.core.item_table import Predictions
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import TOO_LONG, GateValue, MetricKey, metric
from mlflow_compress.metrics.core.requirements import ITEMS, PREDICTIONS, VARIANT
from mlflow_compress.metrics.stats.arrays import Int
from mlflow_compress.records import MetricResult

_ACCURACY = MetricKey.share(
    "quality/accuracy",
    "higher",
    "Share of scored items that the model answers right, by each task's own rule; pooled over multiple "
    "choice, or over all items if there is none.",
    label="Accuracy",
    headline=50,
    leaderboard=True,
    by_task=True,
    difference="quality/accuracy_delta",
    unscored=TOO_LONG,
)
ACCURACY_BASELINE = MetricKey.share(
    "quality/accuracy_baseline", "neither", "The baseline's accuracy on the same items."
)


@metric(
    "accuracy",
    keys=(_ACCURACY, ACCURACY_BASELINE),
    requires=(ITEMS, PREDICTIONS),
    source="lm-evaluation-harness acc / acc_norm; unscored items are counted apart, not as wrong, and of two models "
    "the items count that both have answered",
    weighted=True,
)
def accuracy(inputs: MetricInputs) -> list[MetricResult]:
    """``#correct / #scored``, pooled over the headline's items (micro-average), by task and by category."""
    results = _share_right(inputs, inputs.subject_predictions, _ACCURACY)
    if inputs.variant is not None:
        results += _share_right(inputs, inputs.baseline_predictions, ACCURACY_BASELINE)
    return results


def _share_right(inputs: MetricInputs, model: Predictions, key: MetricKey) -> list[MetricResult]:
    def share(rows: Int) -> Estimates:
        return {key: Proportion.of(model.correct[rows, 0], inputs.units(rows))}

    return by_subset(inputs, share, scored=model.scored[:, 0] if inputs.variant is None else inputs.scored_by_both)


_DELTA = MetricKey.share(
    "quality/accuracy_delta",
    "higher",
    "Variant minus baseline accuracy on items that both answered; Tango's paired score interval.",
    low=-1.0,
    label="Accuracy difference",
    leaderboard=True,
    by_task=True,
    # The far end of the change as a loss in percent points
    gate=GateValue(
        "gate/accuracy_drop_pct_upper",
        lambda delta, pooled: None if delta.low is None else -100.0 * delta.low,
        factor=-100.0,
    ),
    gate_label="accuracy drop in points",
)
_P_VALUE = MetricKey.probability(
    "quality/mcnemar_p", "neither", "McNemar's mid-p value of the accuracy change.", by_category=False
)


@metric(
    "accuracy_delta",
    keys=(_DELTA, _P_VALUE),
    requires=(ITEMS, VARIANT, PREDICTIONS),
    source="Accuracy is Not All You Need, section 2: (w2c - c2w)/N; McNemar's mid-p: Fagerland et al. 2013; Tango 1998",
    weighted=True,
)
def accuracy_delta(inputs: MetricInputs) -> list[MetricResult]:
    """``(w2c - c2w)/N`` over items with a prediction of both models, with McNemar's mid-p value."""

    def change(rows: Int) -> Estimates:
        before, after = inputs.baseline_predictions.correct[rows, 0], inputs.variant_predictions.correct[rows, 0]
        difference = PairedDifference.of(before, after, inputs.units(rows))
        return {_DELTA: difference, _P_VALUE: difference.p_value}

    return by_subset(inputs, change, scored=inputs.scored_by_both)
