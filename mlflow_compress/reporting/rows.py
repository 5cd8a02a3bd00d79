"""Rows of the headline table, for the report, the terminal and the run's note."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from mlflow_compress.metrics.core.metric_registry import MetricKey, all_keys, headline_keys, key
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.numbers import (
    NATS,
    PERCENT,
    Scale,
    bytes_text,
    interval_text,
    ratio_text,
    saved_dense,
    scale_of,
    value_text,
)


def _side(change: float, direction: str) -> str:
    if direction == "neither":
        return "yes"
    return "yes, better" if (change > 0) == (direction == "higher") else "yes, worse"


def separates(result: MetricResult, unchanged: float) -> str | None:
    """Return whether the interval of a difference excludes `unchanged`, that is, "no change"; None without interval."""
    if result.value == unchanged and (result.low is None or result.low == result.high):
        return "no: exactly the same"
    if result.low is None or result.high is None:
        return None
    if result.low <= unchanged <= result.high:
        return "no"
    return _side(result.value - unchanged, key(result.name).direction)


def above_floor(result: MetricResult, floor: MetricResult | None, unchanged: float) -> str:
    """Return whether a distance exceeds its noise floor. `unchanged` is the distance of equal models."""
    if result.value == unchanged:
        counted = (
            result.low is not None and result.low != result.high
        )  # no event in n items does not mean that there is never one
        return f"no: none in {result.n:,}" if counted else "no: exactly the same"
    grows = unchanged == 0.0
    if floor is None:
        near = result.low if grows else result.high
        near = result.value if near is None else near
        return "yes, no noise floor measured" if (near > unchanged) == grows and near != unchanged else "no"
    if grows:
        exceeds = (result.value if result.low is None else result.low) > (
            floor.value if floor.high is None else floor.high
        )
    else:
        exceeds = (result.value if result.high is None else result.high) < (
            floor.value if floor.low is None else floor.low
        )
    return "yes" if exceeds else "no: overlaps the noise floor"


def noise_floor_text(pooled: Mapping[str, MetricResult], name: str) -> MetricResult | None:
    """Return the noise floor of a distance, `noise/<metric>` for `distance/<metric>`; None if it was not measured."""
    return pooled.get("noise/" + name.partition("/")[2])


Pooled = Mapping[str, MetricResult]


class Sizes(Protocol):
    """Interface of a checkpoint's manifest, as far as the tables use it."""

    @property
    def base_size_bytes(self) -> int:
        """Bytes of the baseline's stored tensors."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of the variant's stored tensors."""
        ...

    @property
    def size_ratio(self) -> float:
        """Bytes of the baseline divided by bytes of the variant."""
        ...

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight of the linear layers."""
        ...

    @property
    def sparsity(self) -> float | None:
        """Share of exact zeros in the linear layers' weights; None if they are stored packed."""
        ...


@dataclass(frozen=True, kw_only=True)
class HeadlineRow:
    """One row of the headline table, as text. A cell that does not apply is None."""

    label: str  # Name of the metric, and its meaning in one sentence
    meaning: str
    n: str | None = None  # Number of items (tokens, answers), and number of unscored ones
    baseline: str | None = None  # Values of both models, and the difference or distance with its interval
    variant: str | None = None
    difference: str | None = None
    noise: str | None = None  # The noise floor: the same distance between the baseline and a second run of it
    distinguishable: str | None = None  # "yes" or "no", with a reason if needed


KL = "distance/kl_mean"
_SHARE_OF_TOP_ITEM, _SHARE_OF_TOP_PERCENT = "distance/kl_share_top_item_pct", "distance/kl_share_top_percent_pct"
_CLIPPED, _ABOVE_CLIP = "distance/kl_clipped_mean", "distance/kl_above_clip_pct"
_GATED_INSTEAD = (
    (_CLIPPED, "KL, clipped (gate)", NATS, "Mean of the items' KL, each cut at 1 nat: what the gate reads."),
    (_ABOVE_CLIP, "KL above clip (gate)", PERCENT, "Share of items with a KL above 1 nat: what the gate reads."),
)
_KL_ITEMS = "distance/kl_items"
_GATE_KL = "gate/kl_upper"


def kl_not_trusted(pooled: Pooled, gates: Mapping[str, float] | None) -> bool:
    """Return whether the gates read the clipped mean instead of the KL's upper end."""
    if gates is None or _GATE_KL in gates or _CLIPPED not in pooled:
        return False
    return KL in pooled and pooled[KL].value > 0  # equal models need no interval


def only_generated(pooled: Pooled) -> bool:
    """Return whether all answers were generated. Such items have flips, but no options and so no KL."""
    items = pooled.get(_KL_ITEMS)
    return items is not None and items.value == 0


def _count(result: MetricResult, counted: str) -> str:
    """Return the number of items or other units of a result, as in "1,836 (2 unscored)"; "items" is not written."""
    text = f"{result.n:,}" if counted == "items" else f"{result.n:,} {counted}"
    return f"{text} ({result.n_unscored:,} unscored)" if result.n_unscored else text


def _distance_row(key: MetricKey, pooled: Pooled) -> HeadlineRow | None:
    """Return the row of a metric that compares both models; None if it was not computed."""
    result = pooled.get(key.name)
    if result is None:
        return None
    floor = pooled.get(key.floor) if key.floor else None
    scale = scale_of(key.unit)
    return HeadlineRow(
        label=key.label,
        meaning=key.meaning,
        n=_count(result, key.counted),
        difference=interval_text(result, scale, difference=False),
        noise=None if floor is None else interval_text(floor, scale, difference=False),
        distinguishable=separates(result, key.unchanged)
        if key.low < key.unchanged < key.high  # it may be moved either way, such as a win rate
        else above_floor(result, floor, key.unchanged),
    )


def _compared_row(key: MetricKey, pooled: Pooled, keys: Mapping[str, MetricKey]) -> HeadlineRow | None:
    """Return the row of a metric that each model has: both values, and their difference if one is declared."""
    baseline, variant = pooled.get(_baseline(key)), pooled.get(key.name)
    change = pooled.get(key.difference) if key.difference else None
    counted = change or variant or baseline
    if counted is None:
        return None
    scale, difference, unchanged = scale_of(key.unit), None, 0.0
    floor = pooled.get(key.floor) if key.floor else None
    if change is not None:
        unchanged = keys[change.name].unchanged
        ratio = unchanged == 1.0
        shown = Scale(decimals=3) if ratio else scale
        difference = ("x" if ratio else "") + interval_text(change, shown, difference=not ratio)
    return HeadlineRow(
        label=key.label,
        meaning=key.meaning,
        n=_count(counted, key.counted),
        baseline=None if baseline is None else value_text(baseline, scale),
        variant=None if variant is None else value_text(variant, scale),
        difference=difference,
        noise=None if floor is None else interval_text(floor, scale, difference=False),
        distinguishable=None if change is None else separates(change, unchanged),
    )


def _baseline(key: MetricKey) -> str:
    """Return the key of a metric's value for the baseline."""
    return f"{key.name}_baseline"


def _kl_rows(pooled: Pooled, gates: Mapping[str, float] | None) -> list[HeadlineRow]:
    """Return the rows under the KL of the items: the share of its largest items, and the values that the gate reads."""
    if only_generated(pooled):
        meaning = "KL compares the probabilities of given options."
        return [
            HeadlineRow(label="KL, items (nats)", meaning=meaning, difference="not measured: answers are generated")
        ]
    rows = []
    item, percent = pooled.get(_SHARE_OF_TOP_ITEM), pooled.get(_SHARE_OF_TOP_PERCENT)
    if item is not None and percent is not None:
        held = f"{value_text(item, PERCENT)} / {value_text(percent, PERCENT)} of the mean"
        meaning = "How much of the mean KL the item with the largest KL holds, and the largest percent of the items."
        rows.append(
            HeadlineRow(label="KL in largest item / 1 %", meaning=meaning, n=_count(item, "items"), difference=held)
        )
    if kl_not_trusted(pooled, gates):
        for name, label, scale, meaning in _GATED_INSTEAD:
            result = pooled.get(name)
            if result is not None:
                text = interval_text(result, scale, difference=False)
                rows.append(HeadlineRow(label=label, meaning=meaning, n=_count(result, "items"), difference=text))
    return rows


def _size_rows(sizes: Sizes) -> list[HeadlineRow]:
    size = HeadlineRow(
        label="Size",
        meaning="Bytes of the stored tensors.",
        baseline=bytes_text(sizes.base_size_bytes),
        variant=bytes_text(sizes.size_bytes),
        difference=ratio_text(sizes.size_ratio),
    )
    zeros = HeadlineRow(
        label="Zeros in linear weights",
        meaning="Share of the linear layers' weights that are exactly 0.",
        variant=f"{100 * (sizes.sparsity or 0.0):.0f} %",
        difference="saved dense: no smaller on disk",
    )
    bits = HeadlineRow(
        label="Bits per weight",
        meaning="Stored bits per weight of the linear layers, scales and zero points included.",
        variant=f"{sizes.bits_per_weight:.2f}",
    )
    return [size, *([zeros] if saved_dense(sizes.size_ratio, sizes.sparsity) else []), bits]


def headline_rows(
    pooled: Pooled, sizes: Sizes | None = None, gates: Mapping[str, float] | None = None
) -> list[HeadlineRow]:
    """Return the headline table's rows in the order that the metrics declare (`MetricKey.headline`).

    A metric that was not computed has no row.

    Parameters
    ----------
    pooled : mapping of str to MetricResult
        Pooled results by key: `metrics.headline(results)`.
    sizes : Sizes, optional
        The checkpoint's manifest.
    gates : mapping of str to float, optional
        Values that promotion gates read, by key. "gate/kl_upper" is missing if the KL's interval cannot be trusted.
    """
    keys = all_keys()
    rows: list[HeadlineRow | None] = []
    for headline in headline_keys():
        both = _baseline(headline) in keys
        rows.append(_compared_row(headline, pooled, keys) if both else _distance_row(headline, pooled))
        if headline.name == KL:
            rows += _kl_rows(pooled, gates)
    return [row for row in rows if row is not None] + ([] if sizes is None else _size_rows(sizes))


def interval_percent(pooled: Pooled) -> str:
    """Return the level of the intervals, as in "95 %"."""
    levels = {result.level for result in pooled.values() if result.low is not None}
    return " / ".join(f"{100 * level:g} %" for level in sorted(levels)) or "95 %"
