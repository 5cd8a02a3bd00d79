"""How much the mean KL depends on a few items, and two bounded values that replace it in that case."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mlflow_compress.metrics.core import requirements
from mlflow_compress.metrics.core.estimates import Estimates, Mean, Number, Proportion, by_subset, pooled
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import GateValue, MetricKey, Pooled, metric, upper_end
from mlflow_compress.metrics.stats.arrays import Float, Int
from mlflow_compress.metrics.stats.intervals import are_grouped, group_sums
from mlflow_compress.metrics.stats.stratified import Units
from mlflow_compress.records import MetricResult

CLIP = 1.0
"""Nats at which the KL of an item is clipped."""


def mean_kl(values: Float, units: Units | Int | None) -> Mean:
    """Return the mean of those KLs of items that are not NaN, with an interval where none is above the clip.

    No sample says how large an item can be that is not in it, so that no interval of a mean without a bound holds what
    it promises. This is that of the clipped mean, which the mean is here: it holds if no other item is above the clip
    either, which `ABOVE_CLIP` bounds.
    """
    mean = Mean.of_scored(np.maximum(values, 0.0), units)  # rounding below 0 removed
    return replace(mean, bounds=(0.0, CLIP), has_interval=bool((mean.values <= CLIP).all()))


def top_share_pct(kl: Float, count: int) -> float:
    """Return the percentage of a sum that its `count` largest values hold; the sum must be positive."""
    return float(100.0 * np.sort(kl)[-count:].sum() / kl.sum())


TOP_ITEM = MetricKey.percent(
    "distance/kl_share_top_item_pct",
    "neither",
    "Share of the mean KL that one item, or one group of items, holds.",
    by_category=False,
)
TOP_PERCENT = MetricKey.percent(
    "distance/kl_share_top_percent_pct",
    "neither",
    "Share of the mean KL that the largest percent of the items hold (rounded up to whole items).",
    by_category=False,
)


CLIPPED_KL = MetricKey(
    name="distance/kl_clipped_mean",
    direction="lower",
    high=CLIP,
    unit="nats",
    label="KL per item, clipped (nats)",
    meaning="Mean KL of the items, each clipped at 1 nat, which the gate reads; Gaffke's interval.",
    by_category=False,
    gate=GateValue("gate/kl_clipped_upper", upper_end),
)
ABOVE_CLIP = MetricKey.percent(
    "distance/kl_above_clip_pct",
    "lower",
    "Share of items with a KL above 1 nat, which the gate reads; interval of a share.",
    label="Items above the clip",
    by_category=False,
    gate=GateValue("gate/kl_above_clip_pct_upper", upper_end),
)


def shows_clipped(pooled: Pooled) -> bool:
    """Return whether the clipped mean and what is above it are shown, as gates read them: the mean has no interval."""
    kl = pooled.get("distance/kl_mean")
    return kl is not None and kl.high is None and kl.value != 0 and CLIPPED_KL.name in pooled


KL_ITEMS = MetricKey(
    name="distance/kl_items",
    unit="items",
    meaning="Items over which the mean KL is taken; 0 if the answers of all items are generated.",
    gate=GateValue("gate/kl_items", lambda result, pooled: result.value),
)


def _by_subset(inputs: MetricInputs, formula: Callable[[Float, Units], Estimates]) -> list[MetricResult]:
    """Return the results of a formula of the items' KL, rounding below 0 removed, and of their groups."""
    kl = np.maximum(inputs.distance("kl"), 0.0)
    scored = np.isfinite(kl)
    return by_subset(
        inputs, lambda rows: formula(kl[rows], inputs.units(rows)), scored=scored, families=inputs.view.scored
    )


@metric(
    "kl_concentration",
    keys=(TOP_ITEM, TOP_PERCENT),
    requires=(requirements.ITEMS, requirements.VARIANT, requirements.OPTION_DISTANCES, requirements.POSITIVE_KL),
    source="ours; no interval of a mean can be trusted where one item holds much of it",
)
def kl_concentration(inputs: MetricInputs) -> list[MetricResult]:
    """``100 max(KL)/sum(KL)``, and the same of the ``ceil(n/100)`` largest; none where every KL is 0.

    Of items in groups the first is the largest sum of a group, as groups are what the mean's interval draws.
    """

    def shares(kl: Float, units: Units) -> Estimates:
        if kl.sum() <= 0.0:
            return {}
        groups = units.groups
        n, sums = len(kl), group_sums(kl, groups)[0] if are_grouped(groups) else kl
        return {
            TOP_ITEM: Number(top_share_pct(sums, 1), n),
            TOP_PERCENT: Number(top_share_pct(kl, math.ceil(n / 100)), n),
        }

    return _by_subset(inputs, shares)


@metric(
    "kl_clipped",
    keys=(CLIPPED_KL, ABOVE_CLIP),
    requires=(requirements.ITEMS, requirements.VARIANT, requirements.OPTION_DISTANCES),
    source="ours; Gaffke 2005 for the clipped mean, Wilson 1927 for the share",
    noise=True,
    weighted=True,
)
def kl_clipped(inputs: MetricInputs) -> list[MetricResult]:
    """``mean(min(KL, 1))`` and ``100 #(KL > 1)/n``: bounded, so that their intervals hold whatever the tail."""

    def bounded(kl: Float, units: Units) -> Estimates:
        clipped = Mean.of(np.minimum(kl, CLIP), units, bounds=(0.0, CLIP))
        return {CLIPPED_KL: clipped, ABOVE_CLIP: Proportion.of(kl > CLIP, units)}

    return _by_subset(inputs, bounded)


@metric(
    "kl_items",
    keys=(KL_ITEMS,),
    requires=(requirements.ITEMS, requirements.VARIANT, requirements.PREDICTIONS, requirements.ITEM_DISTANCES),
    source="ours; a generated answer has no distribution that both models give to the same text",
    weighted=True,
)
def kl_items(inputs: MetricInputs) -> list[MetricResult]:
    """Number of headline items with a KL; 0 says that there is none by construction, not that it was not measured."""
    rows = inputs.headline_rows
    if not len(rows):
        return []
    scored = np.isin(inputs.view.family[rows], inputs.view.scored)
    n = int(np.isfinite(inputs.distance("kl")[rows]).sum()) if scored.any() else 0
    return pooled(inputs, {KL_ITEMS: Number(n, len(rows))})
