"""Flips: answers that changed between two models, even if the accuracy did not change."""

from mlflow_compress.metrics.core.estimates import Estimates, Proportion, by_subset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import TOO_LONG, GateValue, MetricKey, metric, upper_end
from mlflow_compress.metrics.core.requirements import ITEMS, PREDICTIONS, VARIANT
from mlflow_compress.metrics.stats.arrays import Int
from mlflow_compress.records import MetricResult

ITEM_FLIPS = MetricKey.percent(
    "distance/flips_pct",
    "lower",
    "Items whose correctness changed, in either direction; pooled over multiple choice, or all items if there is none.",
    label="Answers flipped",
    headline=10,
    floor="noise/flips_pct",
    leaderboard=True,
    by_task=True,
    unscored=TOO_LONG,
    gate=GateValue("gate/flips_pct_upper", upper_end),
    gate_label="flips in %",
)
ALL_FLIPS = MetricKey.percent(
    "distance/all_flips_pct",
    "lower",
    "Multiple-choice items whose answer changed, also from one wrong answer to another.",
    label="Answers changed at all",
    headline=20,
    floor="noise/all_flips_pct",
    leaderboard=True,
    by_task=True,
)
# Categories carry the two headline rates only: 57 subjects times seven rates help nobody.
C2W, W2C, W2W, CHANGED_CORRECT, CHANGED_INCORRECT = (
    MetricKey.percent(f"distance/{name}", "lower", meaning, by_category=False)
    for name, meaning in {
        "c2w_pct": "Items that went from right to wrong.",
        "w2c_pct": "Items that went from wrong to right.",
        "w2w_pct": "Items that went from one wrong answer to another.",
        "changed_correct_pct": "Among the items that the baseline answers right, those that the variant answers wrong.",
        "changed_incorrect_pct": "Among the items that the baseline answers wrong, those with another answer.",
    }.items()
)


@metric(
    "flips",
    keys=(ITEM_FLIPS, ALL_FLIPS, C2W, W2C, W2W, CHANGED_CORRECT, CHANGED_INCORRECT),
    requires=(ITEMS, VARIANT, PREDICTIONS),
    source="Accuracy is Not All You Need, sections 2 and 5, table 2",
    noise=True,
    weighted=True,
)
def flips(inputs: MetricInputs) -> list[MetricResult]:
    """All transitions in percent, with intervals of shares; `all_flips` and what needs answers: multiple choice."""
    b, q = inputs.baseline_predictions, inputs.variant_predictions

    def shares(rows: Int) -> Estimates:
        right, other, groups = b.correct[rows, 0], q.correct[rows, 0], inputs.units(rows)
        values = {
            ITEM_FLIPS: Proportion.of(right != other, groups),
            C2W: Proportion.of(right & ~other, groups),
            W2C: Proportion.of(~right & other, groups),
            CHANGED_CORRECT: Proportion.of(~other[right], groups[right]),
        }
        if inputs.view.chooses[rows].all():
            changed = b.content[rows, 0] != q.content[rows, 0]
            between_wrong = ~right & ~other & changed
            values[ALL_FLIPS] = Proportion.of((right != other) | between_wrong, groups)
            values[W2W] = Proportion.of(between_wrong, groups)
            values[CHANGED_INCORRECT] = Proportion.of((other | changed)[~right], groups[~right])
        return values

    return by_subset(inputs, shares, scored=inputs.scored_by_both)
