"""Answers that an application has logged: how many of them the variant would have written otherwise."""

from mlflow_compress.metrics.core.estimates import Estimates, Proportion, by_subset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, MetricKey, metric
from mlflow_compress.metrics.core.requirements import ITEMS, OPTION_DISTANCES, VARIANT, family
from mlflow_compress.metrics.stats.arrays import Int
from mlflow_compress.records import MetricResult

PARTED = MetricKey.percent(
    "distance/logged_parted_pct",
    "lower",
    "Logged answers in which the most probable token differs at least once.",
    label="Logged answers parted",
    headline=28,
    on_main_run=False,
    by_task=True,
    counted="answers",
    on_request=True,
)


@METRICS.register("logged_answers")
@metric(
    keys=(PARTED,),
    requires=(ITEMS, VARIANT, OPTION_DISTANCES, family("logged")),
    source="ours; the first divergent token of greedy decoding, on text that was logged",
    weighted=True,
)
def logged_answers(inputs: MetricInputs) -> list[MetricResult]:
    """Share of the logged answers that greedy decoding of both models, forced along them, does not follow alike."""
    same = inputs.distance("same_top")

    def parted(rows: Int) -> Estimates:
        return {PARTED: Proportion.of(same[rows] < 1.0, inputs.units(rows))}

    return by_subset(inputs, parted, scored=same == same, families=("logged",))
