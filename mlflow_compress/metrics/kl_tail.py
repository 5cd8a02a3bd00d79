"""How far the mean KL hangs on a few items, and the two numbers with honest bounds that stand in for it then."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mlflow_compress.metrics.core.item_table import ItemSubset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, Direction, MetricKey, metric
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.metrics.stats.bounded_mean import bounded_mean_interval
from mlflow_compress.metrics.stats.intervals import wilson
from mlflow_compress.records import MetricResult

CLIP = 1.0
"""Nats at which the KL of an item is clipped."""


TRUSTED_ITEMS = 200
"""Fewest items whose mean KL has an interval that a gate may read."""

TRUSTED_TOP_PCT = 2.5
"""A gate reads the interval of the mean KL only where the largest item holds less of the mean than this.

Chosen by simulation on real samples of 200 items and more, whatever their largest item holds
(`benchmarks/interval_coverage.py`): no interval is both trusted and too low in more than 2.9 % of the draws. With 5 %
one is in 11 %, because a sample that missed the largest item looks harmless; with 3 % one is in 4.7 to 5.7 %.
"""


def mean_is_trusted(kl: MetricResult, top_item: MetricResult | None) -> bool:
    """Return whether a gate may read the interval of a mean KL.

    Parameters
    ----------
    kl : MetricResult
        The mean KL.
    top_item : MetricResult, optional
        `distance/kl_share_top_item_pct`; where every KL is 0 there is none, and nothing is known of the tail.
    """
    return kl.n >= TRUSTED_ITEMS and top_item is not None and top_item.value < TRUSTED_TOP_PCT


def top_share_pct(kl: Float, count: int) -> float:
    """Return the percentage of a sum that its `count` largest values hold; the sum must be positive.

    Examples
    --------
    >>> top_share_pct(np.array([1.0, 6.0, 3.0]), 1)
    60.0
    """
    return float(100.0 * np.sort(kl)[-count:].sum() / kl.sum())


def _kl_by_subset(inputs: MetricInputs) -> Iterator[tuple[ItemSubset, Float, int]]:
    """Yield the KL of each subset's items, rounding below 0 removed, and how many items have none."""
    scored = inputs.view.scored
    pooled = [family for family in inputs.headline_families if family in scored]
    for subset in inputs.subsets(scored, pooled=pooled, categories=()):
        kl = inputs.distance("kl")[subset.rows]
        there = np.isfinite(kl)
        if there.any():
            yield subset, np.maximum(kl[there], 0.0), int((~there).sum())


def _key(name: str, direction: Direction, high: float, unit: str, meaning: str) -> MetricKey:
    return MetricKey(name=f"distance/{name}", direction=direction, low=0.0, high=high, unit=unit, meaning=meaning)


@METRICS.register("kl_concentration")
@metric(
    keys=(
        _key("kl_share_top_item_pct", "neither", 100.0, "percent", "Share of the mean KL that one item holds."),
        _key(
            "kl_share_top_percent_pct",
            "neither",
            100.0,
            "percent",
            "Share of the mean KL that the largest percent of the items hold (rounded up to whole items).",
        ),
    ),
    requires=("items", "variant", "option_distances", "positive_kl"),
    source="ours; no interval of a mean can be trusted where one item holds much of it",
)
def kl_concentration(inputs: MetricInputs) -> list[MetricResult]:
    """``100 max(KL)/sum(KL)``, and the same of the ``ceil(n/100)`` largest; none where every KL is 0."""
    level, results = inputs.settings.level, []
    for subset, kl, left in _kl_by_subset(inputs):
        if kl.sum() > 0.0:
            n = len(kl)
            for name, count in (("item", 1), ("percent", math.ceil(n / 100))):
                key = f"distance/kl_share_top_{name}_pct"
                results.append(subset.result(key, top_share_pct(kl, count), n=n, level=level, n_unscored=left))
    return results


@METRICS.register("kl_clipped")
@metric(
    keys=(
        _key(
            "kl_clipped_mean", "lower", CLIP, "nats", "Mean KL of the items, each clipped at 1 nat; betting interval."
        ),
        _key("kl_above_clip_pct", "lower", 100.0, "percent", "Share of items with a KL above 1 nat; Wilson interval."),
    ),
    requires=("items", "variant", "option_distances"),
    source="ours; Waudby-Smith and Ramdas 2024 for the clipped mean, Wilson 1927 for the share",
)
def kl_clipped(inputs: MetricInputs) -> list[MetricResult]:
    """``mean(min(KL, 1))`` and ``100 #(KL > 1)/n``: bounded, so that their intervals hold whatever the tail."""
    level, results = inputs.settings.level, []
    for subset, kl, left in _kl_by_subset(inputs):
        n, clipped, above = len(kl), np.minimum(kl, CLIP), int((kl > CLIP).sum())
        interval = bounded_mean_interval(clipped, upper=CLIP, level=level)
        low, high = wilson(above, n, level=level)
        for name, value, ends in (
            ("kl_clipped_mean", float(clipped.mean()), (interval.low, interval.high)),
            ("kl_above_clip_pct", 100.0 * above / n, (100.0 * low, 100.0 * high)),
        ):
            results.append(subset.result(f"distance/{name}", value, ends, n=n, level=level, n_unscored=left))
    return results


@METRICS.register("kl_items")
@metric(
    keys=(
        _key(
            "kl_items",
            "neither",
            math.inf,
            "items",
            "Items that the mean KL is taken over; 0 where the answers of all items are generated.",
        ),
    ),
    requires=("items", "variant", "predictions", "item_distances"),
    source="ours; a generated answer has no distribution that both models give to the same text",
)
def kl_items(inputs: MetricInputs) -> list[MetricResult]:
    """Number of headline items with a KL; 0 says that there is none by construction, not that it was not measured."""
    rows = np.flatnonzero(np.isin(inputs.view.family, inputs.headline_families))
    if not len(rows):
        return []
    scored = np.isin(inputs.view.family[rows], inputs.view.scored)
    n = int(np.isfinite(inputs.distance("kl")[rows]).sum()) if scored.any() else 0
    return [ItemSubset(None, None, rows).result("distance/kl_items", n, n=len(rows), level=inputs.settings.level)]
