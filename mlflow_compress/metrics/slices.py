"""Slices: the tasks, categories and scripts in which a variant moves more than in the others."""

import numpy as np

from mlflow_compress.metrics.core.estimates import Estimate, Mean, PairedDifference, Proportion
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import metric
from mlflow_compress.metrics.core.requirements import ITEM_DISTANCES, ITEMS, PREDICTIONS, VARIANT
from mlflow_compress.metrics.core.slicing import SlicedDistance, by_slice, slice_key, slicings
from mlflow_compress.metrics.kl_tail import CLIP
from mlflow_compress.metrics.stats.arrays import Float, Int
from mlflow_compress.records import MetricResult

WORST_FLIPS = slice_key(
    "distance/worst_slice_flips_pct",
    "Items whose correctness changed,",
    unit="percent",
    high=100.0,
    label="Flips, worst slice",
    headline=25,
    on_main_run=False,
)
WORST_KL = slice_key("distance/worst_slice_kl_clipped", "Mean KL clipped at 1 nat per item,", unit="nats", high=CLIP)
WORST_DROP = slice_key(
    "quality/worst_slice_drop_pct", "Points of accuracy lost,", unit="percent", low=-100.0, high=100.0
)


@metric(
    "slices",
    keys=(WORST_FLIPS, WORST_KL, WORST_DROP),
    requires=(ITEMS, VARIANT, PREDICTIONS, ITEM_DISTANCES),
    source="ours; see `larger_part_p` and `holm`",
)
def slices(inputs: MetricInputs) -> list[MetricResult]:
    """Flips, clipped KL and loss of accuracy by slice of the headline's items; see `by_slice`."""
    view, rows = inputs.view, inputs.headline_rows
    if not len(rows):
        return []
    texts = [
        item["question"] or item["prompt"] or ""
        for item in view.items.table.select(["question", "prompt"]).take(rows).to_pylist()
    ]
    before, after = (model.correct[rows, 0] for model in (inputs.baseline_predictions, inputs.variant_predictions))
    both, groups = inputs.scored_by_both[rows] & np.isin(view.family[rows], view.graded), view.group[rows]

    def scored(values: Float) -> Float:
        return np.where(both, values, np.nan)

    def drop(some: Int) -> Estimate:
        return PairedDifference.of(after[some], before[some], groups[some])

    distances = [
        SlicedDistance(
            WORST_FLIPS,
            scored((before != after).astype(np.float64)),
            groups,
            lambda some: Proportion.of((before != after)[some], groups[some]),
        ),
        SlicedDistance(WORST_DROP, scored(before.astype(np.float64) - after), groups, drop),
    ]
    if np.isin(view.family[rows], view.scored).any():
        kl = np.clip(inputs.distance("kl")[rows], 0.0, CLIP)  # NaN stays
        distances.insert(
            1,
            SlicedDistance(WORST_KL, kl, groups, lambda some: Mean.of(kl[some], groups[some], upper=CLIP)),
        )
    sliced = slicings(view.task[rows].tolist(), view.category[rows].tolist(), texts)
    return by_slice(inputs, sliced, distances)
