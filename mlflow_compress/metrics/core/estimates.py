"""Estimates that know their interval, and the loop that gives them for all items, every task and every category."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from mlflow_compress.metrics.core.item_table import EVERYTHING, ItemSubset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, MetricSettings
from mlflow_compress.metrics.core.metric_registry import MetricKey
from mlflow_compress.metrics.stats import intervals, stratified
from mlflow_compress.metrics.stats.arrays import Bool, Float, Int
from mlflow_compress.metrics.stats.bootstrap import Statistic, cluster_sums, jackknife_interval
from mlflow_compress.metrics.stats.significance import grouped_mcnemar_mid_p, mcnemar_mid_p
from mlflow_compress.records import MetricResult

Bounds = tuple[float, float]


class Estimate(Protocol):
    """A number from `n` items, with its interval."""

    @property
    def n(self) -> int:
        """Items that the number is from; 0 where it does not exist."""

    @property
    def n_unscored(self) -> int | None:
        """Items without a value; None for those of the subset that are not `scored` (see `by_subset`)."""

    def at(self, settings: MetricSettings, factor: float) -> tuple[float, Bounds | None]:
        """Return value and interval, which is None where there are too few values for one.

        `factor` is 100 where a share is given in percent, else 1.
        """


def _effect(
    values: Bool | Int, groups: Int | None, *, rare: bool = False, even: bool = False
) -> intervals.DesignEffect | None:
    """Return the design effect of items in groups; None where every item is a group of its own."""
    if groups is None or not intervals.are_grouped(groups):
        return None
    return intervals.design_effect(values, groups, rare=rare, even=even)


def _apart(units: stratified.Units | Int | None) -> tuple[Int | None, stratified.Design | None]:
    """Return the groups of some items and how they were drawn; a metric that does not weight gives groups alone."""
    return (units.groups, units.design) if isinstance(units, stratified.Units) else (units, None)


Estimates = Mapping[MetricKey, Estimate]


@dataclass(frozen=True)
class Proportion:
    """`count` of `n` items, with the interval of a share; none for items of fewer than `FEWEST_GROUPS` groups."""

    count: float  # Of items that were drawn: n times the weighted share
    n: int
    n_unscored: int | None = None
    effect: intervals.DesignEffect | None = None  # Of items that come in groups
    drawn: stratified.WeightedMean | None = None  # Of items that were drawn

    @classmethod
    def of(cls, hits: Bool, units: stratified.Units | Int | None = None, *, even: bool = False) -> "Proportion":
        """Return the share of hits among items, of shape (n,), that are in groups, or drawn by a design.

        `even` says that the groups are of about one size, see `intervals.design_effect`.
        """
        groups, design = _apart(units)
        if design is not None and len(hits):
            mean = stratified.weighted_mean(hits, design, groups)
            return cls(mean.value * mean.n, mean.n, drawn=mean)
        return cls(
            int(hits.sum()), len(hits), effect=_effect(hits, groups, rare=True, even=even) if len(hits) else None
        )

    def at(self, settings: MetricSettings, factor: float) -> tuple[float, Bounds | None]:
        """Return ``count/n`` and its interval."""
        value = factor * self.count / self.n
        effect = self.effect if self.drawn is None else self.drawn.effect(settings.reading)
        if effect is not None and effect.n_groups < intervals.FEWEST_GROUPS:
            return value, None
        low, high = intervals.share_interval(self.count, self.n, level=settings.level, effect=effect)
        return value, (factor * low, factor * high)


@dataclass(frozen=True)
class PairedDifference:
    """Difference of two proportions of the same `n` items, with Tango's score interval.

    There is no interval for items of fewer than `FEWEST_GROUPS` groups.
    """

    gained: float  # Items that only the second, and only the first model has; weighted where items were drawn
    lost: float
    n: int
    n_unscored: int | None = None
    effect: intervals.DesignEffect | None = None  # Of items that come in groups
    p: float | None = None  # The p-value of items that come in groups, or were drawn
    drawn: stratified.WeightedMean | None = None  # Of items that were drawn

    @classmethod
    def of(
        cls, first: Bool, second: Bool, units: stratified.Units | Int | None = None, *, even: bool = False
    ) -> "PairedDifference":
        """Return the difference of what two models have, both of shape (n,), of items in groups, or drawn by a design.

        Of items that were drawn, the p-value is that of Student's test of the weighted difference. `even` says that the
        groups are of about one size, see `intervals.design_effect`.
        """
        gained, lost = second & ~first, first & ~second
        change = gained.astype(np.int64) - lost
        groups, design = _apart(units)
        if design is not None and len(change):
            mean = stratified.weighted_mean(change, design, groups)
            more, fewer = (mean.n * stratified.weighted_mean(part, design).value for part in (gained, lost))
            return cls(more, fewer, mean.n, p=mean.p_value, drawn=mean)
        effect = _effect(change, groups, even=even) if len(change) else None
        p = None if effect is None or groups is None else grouped_mcnemar_mid_p(change, groups)
        return cls(int(gained.sum()), int(lost.sum()), len(change), effect=effect, p=p)

    def at(self, settings: MetricSettings, factor: float) -> tuple[float, Bounds | None]:
        """Return ``(gained - lost)/n`` and its interval."""
        value = factor * (self.gained - self.lost) / self.n
        effect = self.effect if self.drawn is None else self.drawn.effect(settings.reading)
        if effect is not None and effect.n_groups < intervals.FEWEST_GROUPS:
            return value, None
        low, high = intervals.paired_difference(self.gained, self.lost, self.n, level=settings.level, effect=effect)
        return value, (factor * low, factor * high)

    @property
    def p_value(self) -> "Number":
        return Number(mcnemar_mid_p(int(self.lost), int(self.gained)) if self.p is None else self.p, self.n)


@dataclass(frozen=True)
class Number:
    """A value in the key's unit, with the interval that it has, if any."""

    value: float
    n: int
    n_unscored: int | None = None
    interval: Bounds | None = None

    def at(self, settings: MetricSettings, factor: float) -> tuple[float, Bounds | None]:
        return self.value, self.interval


@dataclass(frozen=True, eq=False)
class Mean:
    """Mean of one value per item in the key's unit, with an interval over items, or over groups of items.

    Values of a key with bounds have an interval that knows them: a share's where every value is one of the two, else
    Gaffke's. Others have the bootstrap's. There is none for items of fewer than `FEWEST_GROUPS` groups.
    """

    values: Float  # shape (n,)
    n_unscored: int | None = None
    skewed: bool = False  # Whether the interval is the studentised bootstrap's, as for means of divergences
    groups: Int | None = None  # Code of each item's group; shape (n,)
    bounds: Bounds | None = None  # Of every value; `of_subset` takes the key's. Not read where `skewed`
    has_interval: bool = True
    design: stratified.Design | None = None  # Of items that were drawn

    @classmethod
    def of(cls, values: Float, units: stratified.Units | Int | None = None, **more: Any) -> "Mean":
        """Return the mean of items, of shape (n,), that are in groups, or drawn by a design."""
        groups, design = _apart(units)
        return cls(values, groups=groups, design=design, **more)

    @classmethod
    def of_scored(cls, values: Float, units: stratified.Units | Int | None = None, *, skewed: bool = False) -> "Mean":
        """Return the mean of the values that are not NaN; the others count as unscored."""
        scored = np.isfinite(values)
        some = None if units is None else units[scored]
        return cls.of(values[scored], some, n_unscored=int((~scored).sum()), skewed=skewed)

    @property
    def n(self) -> int:
        return len(self.values)

    def at(self, settings: MetricSettings, factor: float) -> tuple[float, Bounds | None]:
        if self.design is not None:
            return self._of_drawn(self.design, settings)
        value, sizes, values = float(self.values.mean()), None, self.values
        if not self.has_interval:
            return value, None
        low, high = self.bounds or (0.0, 0.0)
        if self.bounds is not None and not self.skewed and np.isin(values, self.bounds).all():
            _, ends = Proportion.of(values == high, self.groups).at(settings, high - low)
            return value, None if ends is None else (low + ends[0], low + ends[1])
        if self.groups is not None and intervals.are_grouped(self.groups):
            values, sizes = intervals.group_sums(values, self.groups)
            if intervals.effective_groups(sizes) < intervals.FEWEST_GROUPS:
                return value, None
        if self.bounds is not None and not self.skewed:
            return value, intervals.bounded_mean_interval(values, sizes, low=low, high=high, level=settings.level)
        if self.skewed or sizes is not None:  # of groups, whose sizes differ, BCa's does not cover what it promises
            return value, settings.skewed_interval(values, sizes)
        return value, settings.interval(values)

    def _of_drawn(self, design: stratified.Design, settings: MetricSettings) -> tuple[float, Bounds | None]:
        mean = stratified.weighted_mean(self.values, design, self.groups)
        if not self.has_interval or mean.n_groups < intervals.FEWEST_GROUPS:
            return mean.value, None
        if self.bounds is not None and not self.skewed:
            low, high = self.bounds
            effect = mean.effect(settings.reading)
            if effect.effect == 0.0:  # nothing is left to vary: all items of the benchmark were drawn
                return mean.value, (mean.value, mean.value)
            count = mean.n / effect.effect if mean.spread > 0.0 else float(mean.n_groups)
            w = design.weight
            return mean.value, intervals.bounded_mean_interval(
                w * self.values, w, count=count, low=low, high=high, level=settings.level
            )
        values = stratified.as_if_independent(self.values, design, mean.variance(settings.reading))
        return mean.value, settings.skewed_interval(values) if self.skewed else settings.interval(values)


@dataclass(frozen=True, eq=False)
class Resampled:
    """A statistic of column means in the key's unit, with a bootstrap interval over items, or over groups of items.

    There is no interval for items of fewer than `FEWEST_GROUPS` groups.
    """

    columns: Float  # One row per item; shape (n, n_columns)
    statistic: Statistic  # From column means, shape (..., n_columns), to values, shape (...)
    n_unscored: int | None = None
    groups: Int | None = None  # Code of each item's group; shape (n,)
    jackknife: bool = False  # Whether the interval is the jackknife's, as for a statistic that rests on few items
    positive: bool = False  # Of a ratio above 0: whether that is the interval of its logarithm, which has no skew
    # Of the ratio of two columns: the largest value of both, by which it has an interval where it never differs
    most: float | None = None

    @property
    def n(self) -> int:
        return len(self.columns)

    @property
    def value(self) -> float:
        """The statistic of the items' means; not finite where it does not exist."""
        return float(self.statistic(self.columns.mean(axis=0)))

    def at(self, settings: MetricSettings, factor: float) -> tuple[float, Bounds | None]:
        interval = partial(jackknife_interval, level=settings.level) if self.jackknife else settings.interval
        columns, statistic, sizes = self.columns, self.statistic, None
        if self.groups is not None and intervals.are_grouped(self.groups):
            columns = cluster_sums(self.columns, self.groups)
            sizes = columns[:, -1]
            if intervals.effective_groups(sizes) < intervals.FEWEST_GROUPS:
                return self.value, None
            statistic = self._of_groups
        ends = interval(columns, partial(_log_of, statistic) if self.positive else statistic)
        if ends is not None and self.positive:
            ends = intervals.Interval(math.exp(ends.low), math.exp(ends.high))
        if ends is None and self.most is not None:
            above, below = columns[:, 0], columns[:, 1]
            ends = intervals.bounded_ratio_interval(above, below, sizes, high=self.most, level=settings.level)
        return self.value, ends

    def _of_groups(self, means: Float) -> Float:
        """Return the statistic of means over groups, whose last column is their size."""
        return self.statistic(means[..., :-1] / means[..., -1:])


def _log_of(statistic: Statistic, means: Float) -> Float:
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(statistic(means)))


def _unchanged(value: float) -> float:
    return value


@dataclass(frozen=True, eq=False)
class Ratio:
    """A mean over values that come in groups, in the key's unit, with the studentised bootstrap's interval over groups.

    Or a function of it that rises or falls throughout, as a perplexity is of a mean negative log-likelihood. There is
    no interval for fewer than `FEWEST_GROUPS` groups, and where the function overflows at an end.
    """

    sums: Float  # Sum of each group's values, and their number; shape (n_groups,)
    sizes: Float
    transform: Callable[[float], float] = _unchanged
    n_unscored: int | None = None

    @property
    def n(self) -> int:
        return int(self.sizes.sum())

    def at(self, settings: MetricSettings, factor: float) -> tuple[float, Bounds | None]:
        value = self.transform(float(self.sums.sum() / self.sizes.sum()))
        enough = intervals.effective_groups(self.sizes) >= intervals.FEWEST_GROUPS
        interval = settings.skewed_interval(self.sums, self.sizes) if enough else None
        if interval is None:
            return value, None
        try:
            low, high = sorted(map(self.transform, interval))
        except OverflowError:  # an end whose perplexity no float can hold
            return value, None
        return value, (low, high)


def by_subset(
    inputs: MetricInputs,
    formula: Callable[[Int], Estimates],
    *,
    scored: Bool | None = None,
    families: Collection[str] | None = None,
) -> list[MetricResult]:
    """Return a formula's results for the headline's items together, then for each task followed by its categories.

    - `formula`: The metric, from row numbers of the items to estimates.
    - `scored` (n_items,): Items that have a value. Others do not reach the formula and are counted as unscored. Without
      it the formula gets every item, and its estimates say how many have no value.
    - `families`: Whose tasks are reported; by default all graded ones.
    """
    families = inputs.view.graded if families is None else families
    together = [family for family in inputs.headline_families if family in families]
    results = []
    for subset in inputs.subsets(families, pooled=together):
        rows = subset.rows if scored is None else subset.rows[scored[subset.rows]]
        if len(rows):
            estimates = formula(rows)
            if subset.category is not None:
                estimates = {key: estimate for key, estimate in estimates.items() if key.by_category}
            results += of_subset(inputs, subset, estimates, n_unscored=len(subset.rows) - len(rows))
    return results


def pooled(inputs: MetricInputs, estimates: Estimates) -> list[MetricResult]:
    """Return the results of estimates that are about everything at once, not about the items of a task."""
    return of_subset(inputs, EVERYTHING, estimates)


def of_subset(
    inputs: MetricInputs, subset: ItemSubset, estimates: Estimates, *, n_unscored: int = 0
) -> list[MetricResult]:
    """Return the results of estimates about one subset; `n_unscored` where they do not say how many have no value."""
    level = inputs.settings.level
    results = []
    for key, estimate in estimates.items():
        if estimate.n:
            if isinstance(estimate, Mean) and estimate.bounds is None and math.isfinite(key.low + key.high):
                estimate = replace(estimate, bounds=(key.low, key.high))
            value, interval = estimate.at(inputs.settings, 100.0 if key.unit == "percent" else 1.0)
            if interval is not None:  # the bootstrap of a share may pass the end of its range
                interval = max(interval[0], key.low), min(interval[1], key.high)
            unscored = n_unscored if estimate.n_unscored is None else estimate.n_unscored
            results.append(subset.result(key.name, value, interval, n=estimate.n, level=level, n_unscored=unscored))
    return results
