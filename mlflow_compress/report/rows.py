"""The rows of the headline table, shared by the page, the terminal and the run's note."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from mlflow_compress.metrics.registry import key
from mlflow_compress.records import MetricResult
from mlflow_compress.report.numbers import (
    NATS,
    PERCENT,
    PLAIN,
    SHARE,
    Scale,
    bytes_text,
    interval_text,
    ratio_text,
    value_text,
)

Pooled = Mapping[str, MetricResult]


class Sizes(Protocol):
    """The part of a compression manifest that the tables show."""

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
        """Baseline over variant bytes."""
        ...

    @property
    def bits_per_weight(self) -> float:
        """Stored bits a weight of the linear layers."""
        ...


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the headline table, as text; None where a cell does not apply.

    Attributes
    ----------
    label, meaning : str
        Short name, and what it means in a sentence.
    baseline, variant, difference : str or None
        Values of both models, and the difference or distance with its interval.
    noise : str or None
        The same distance of the baseline from itself in a second run.
    distinguishable : str or None
        "yes" or "no", with the reason where it needs one.
    """

    label: str
    meaning: str
    baseline: str | None = None
    variant: str | None = None
    difference: str | None = None
    noise: str | None = None
    distinguishable: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """A metric of either model: `<name>_baseline`, `<name>`, and the key of their difference."""

    label: str
    name: str
    scale: Scale
    difference: str | None
    unchanged: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Distance:
    """A metric that compares both models; `unchanged` is its value for identical ones."""

    label: str
    name: str
    scale: Scale
    unchanged: float = 0.0
    floor: str | None = None


_ROWS: tuple[_Compared | _Distance, ...] = (
    _Distance(label="Answers flipped", name="distance/flips_pct", scale=PERCENT),
    _Distance(label="Answers changed at all", name="distance/all_flips_pct", scale=PERCENT),
    _Distance(label="KL, items (nats)", name="distance/kl_mean", scale=NATS),
    _Distance(label="Same top token, items", name="distance/top1_agreement", scale=SHARE, unchanged=1.0),
    _Compared(label="Accuracy", name="quality/accuracy", scale=SHARE, difference="quality/accuracy_delta"),
    _Compared(
        label="Perplexity", name="quality/perplexity", scale=PLAIN, difference="quality/perplexity_ratio", unchanged=1.0
    ),
    _Distance(label="KL, corpus (nats)", name="distance/corpus_kl_mean", scale=NATS),
    _Distance(label="Same top token, corpus", name="distance/corpus_top1_agreement", scale=SHARE, unchanged=1.0),
    _Compared(
        label="Lost under shuffled answers",
        name="robustness/shuffle_drop_pct",
        scale=PERCENT,
        difference="robustness/shuffle_drop_delta_pct",
    ),
    _Compared(label="UAcc", name="uncertainty/uacc", scale=PLAIN, difference="uncertainty/uacc_delta"),
    _Compared(
        label="Conformal set size", name="uncertainty/set_size", scale=PLAIN, difference="uncertainty/set_size_delta"
    ),
    _Compared(label="Conformal coverage", name="uncertainty/coverage", scale=SHARE, difference=None),
    _Compared(label="MT-Bench", name="judge/mt_bench", scale=PLAIN, difference="judge/mt_bench_delta"),
    _Distance(
        label="Similarity of answers",
        name="judge/similarity",
        scale=PLAIN,
        unchanged=1.0,
        floor="judge/similarity_floor",
    ),
)


def _side(change: float, direction: str) -> str:
    if direction == "neither":
        return "yes"
    return "yes, better" if (change > 0) == (direction == "higher") else "yes, worse"


def _separates(result: MetricResult, unchanged: float) -> str | None:
    """Whether a difference's interval excludes the value of "no change"."""
    if result.value == unchanged and (result.low is None or result.low == result.high):
        return "no: exactly the same"
    if result.low is None or result.high is None:
        return None
    if result.low <= unchanged <= result.high:
        return "no"
    return _side(result.value - unchanged, key(result.name).direction)


def _above_floor(result: MetricResult, floor: MetricResult | None, unchanged: float) -> str:
    """Whether a distance is larger than what two runs of the baseline show."""
    if result.value == unchanged:
        return "no: exactly the same"
    grows = unchanged == 0.0
    if floor is None:
        near = result.low if grows else result.high
        near = result.value if near is None else near
        return "yes, no noise floor measured" if (near > unchanged) == grows and near != unchanged else "no"
    if grows:
        apart = (result.value if result.low is None else result.low) > (
            floor.value if floor.high is None else floor.high
        )
    else:
        apart = (result.value if result.high is None else result.high) < (
            floor.value if floor.low is None else floor.low
        )
    return "yes" if apart else "no: overlaps the noise floor"


def noise_floor(pooled: Pooled, name: str) -> MetricResult | None:
    """Return the noise floor of a distance, `noise/<metric>` for `distance/<metric>`, where it was measured."""
    return pooled.get("noise/" + name.partition("/")[2])


def _distance_row(spec: _Distance, pooled: Pooled) -> Row | None:
    result = pooled.get(spec.name)
    if result is None:
        return None
    floor = pooled.get(spec.floor) if spec.floor else noise_floor(pooled, spec.name)
    return Row(
        label=spec.label,
        meaning=key(spec.name).meaning,
        difference=interval_text(result, spec.scale, difference=False),
        noise=None if floor is None else interval_text(floor, spec.scale, difference=False),
        distinguishable=_above_floor(result, floor, spec.unchanged),
    )


def _compared_row(spec: _Compared, pooled: Pooled) -> Row | None:
    baseline, variant = pooled.get(f"{spec.name}_baseline"), pooled.get(spec.name)
    change = pooled.get(spec.difference) if spec.difference else None
    if baseline is None and variant is None and change is None:
        return None
    difference = None
    if change is not None:
        ratio = spec.unchanged == 1.0
        shown = Scale(decimals=3) if ratio else spec.scale
        difference = ("x" if ratio else "") + interval_text(change, shown, difference=not ratio)
    return Row(
        label=spec.label,
        meaning=key(spec.name).meaning,
        baseline=None if baseline is None else value_text(baseline, spec.scale),
        variant=None if variant is None else value_text(variant, spec.scale),
        difference=difference,
        distinguishable=None if change is None else _separates(change, spec.unchanged),
    )


def _size_rows(sizes: Sizes) -> list[Row]:
    return [
        Row(
            label="Size",
            meaning="Bytes of the stored tensors.",
            baseline=bytes_text(sizes.base_size_bytes),
            variant=bytes_text(sizes.size_bytes),
            difference=ratio_text(sizes.size_ratio),
        ),
        Row(
            label="Bits per weight",
            meaning="Stored bits a weight of the linear layers, scales and zero points included.",
            variant=f"{sizes.bits_per_weight:.2f}",
        ),
    ]


def headline_rows(pooled: Pooled, sizes: Sizes | None = None) -> list[Row]:
    """Return the headline table's rows in reading order, at most 16; a metric that was not computed has no row.

    Parameters
    ----------
    pooled : mapping of str to MetricResult
        Pooled results by key: `metrics.headline(results)`.
    sizes : Sizes, optional
        The compression manifest.
    """
    rows = [_distance_row(s, pooled) if isinstance(s, _Distance) else _compared_row(s, pooled) for s in _ROWS]
    return [row for row in rows if row is not None] + ([] if sizes is None else _size_rows(sizes))


def interval_percent(pooled: Pooled) -> str:
    """Return the level of the intervals, as in "95 %"."""
    levels = {result.level for result in pooled.values() if result.low is not None}
    return " / ".join(f"{100 * level:g} %" for level in sorted(levels)) or "95 %"
