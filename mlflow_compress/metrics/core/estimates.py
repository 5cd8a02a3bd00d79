"""Estimates that know their interval, and the loop that gives them for all items, every task and every category."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mlflow_compress.metrics.core.item_table import EVERYTHING, ItemSubset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, MetricSettings
from mlflow_compress.metrics.core.metric_registry import MetricKey
from mlflow_compress.metrics.stats.arrays import Bool, Float, Int
from mlflow_compress.metrics.stats.bootstrap import Statistic
from mlflow_compress.metrics.stats.intervals import paired_difference, wilson
from mlflow_compress.metrics.stats.significance import mcnemar_mid_p
from mlflow_compress.records import MetricResult

Interval = tuple[float, float]


class Estimate(Protocol):
    """A number from `n` items, with its interval."""

    @property
    def n(self) -> int:
        """Items that the number is from; 0 where it does not exist."""

    @property
    def n_unscored(self) -> int | None:
        """Items without a value; None for those of the subset that are not `scored` (see `by_subset`)."""

    def at(self, settings: MetricSettings, factor: float) -> tuple[float, Interval | None]:
        """Return value and interval, which is None where there are too few values for one.

        `factor` is 100 where a share is given in percent, else 1.
        """


Estimates = Mapping[MetricKey, Estimate]


@dataclass(frozen=True)
class Proportion:
    """`count` of `n` items, with Wilson's score interval."""

    count: int
    n: int
    n_unscored: int | None = None

    def at(self, settings: MetricSettings, factor: float) -> tuple[float, Interval | None]:
        """Return ``count/n`` and its interval."""
        low, high = wilson(self.count, self.n, level=settings.level)
        return factor * self.count / self.n, (factor * low, factor * high)


@dataclass(frozen=True)
class PairedDifference:
    """Difference of two proportions of the same `n` items, with Tango's score interval."""

    gained: int  # Items that only the second, and only the first model has
    lost: int
    n: int
    n_unscored: int | None = None

    def at(self, settings: MetricSettings, factor: float) -> tuple[float, Interval | None]:
        """Return ``(gained - lost)/n`` and its interval."""
        low, high = paired_difference(self.gained, self.lost, self.n, level=settings.level)
        return factor * (self.gained - self.lost) / self.n, (factor * low, factor * high)

    @property
    def p_value(self) -> Number:
        """McNemar's mid-p value."""
        return Number(mcnemar_mid_p(self.lost, self.gained), self.n)


@dataclass(frozen=True)
class Number:
    """A value in the key's unit, with the interval that it has, if any."""

    value: float
    n: int
    n_unscored: int | None = None
    interval: Interval | None = None

    def at(self, settings: MetricSettings, factor: float) -> tuple[float, Interval | None]:
        """Return the value and its interval."""
        return self.value, self.interval


@dataclass(frozen=True, eq=False)
class Mean:
    """Mean of one value per item in the key's unit, with a bootstrap interval over items."""

    values: Float  # shape (n,)
    n_unscored: int | None = None
    skewed: bool = False  # Whether the interval is the studentised bootstrap's, as for means of divergences

    @classmethod
    def of_scored(cls, values: Float, *, skewed: bool = False) -> Mean:
        """Return the mean of the values that are not NaN; the others count as unscored."""
        scored = np.isfinite(values)
        return cls(values[scored], int((~scored).sum()), skewed)

    @property
    def n(self) -> int:
        """Number of values."""
        return len(self.values)

    def at(self, settings: MetricSettings, factor: float) -> tuple[float, Interval | None]:
        """Return the mean and its interval."""
        interval = settings.skewed_interval if self.skewed else settings.interval
        return float(self.values.mean()), interval(self.values)


@dataclass(frozen=True, eq=False)
class Resampled:
    """A statistic of column means in the key's unit, with a bootstrap interval over items."""

    columns: Float  # One row per item; shape (n, n_columns)
    statistic: Statistic  # From column means, shape (..., n_columns), to values, shape (...)
    n_unscored: int | None = None

    @property
    def n(self) -> int:
        """Number of items."""
        return len(self.columns)

    @property
    def value(self) -> float:
        """The statistic of the items' means; not finite where it does not exist."""
        return float(self.statistic(self.columns.mean(axis=0)))

    def at(self, settings: MetricSettings, factor: float) -> tuple[float, Interval | None]:
        """Return the value and its interval."""
        return self.value, settings.interval(self.columns, self.statistic)


def mean_of_sums(sums: Float) -> Float:
    """Return the first sum over the last, which counts the values: the statistic of a mean over clusters."""
    return np.asarray(sums[..., 0] / sums[..., -1], dtype=np.float64)


@dataclass(frozen=True, eq=False)
class OverClusters:
    """A statistic of sums over clusters in the key's unit, with a bootstrap interval that draws whole clusters."""

    sums: Float  # Sums of each cluster, its number of values last, as `cluster_sums` returns them
    statistic: Statistic = mean_of_sums
    skewed: bool = False  # Whether it is the mean of the first column, with the studentised bootstrap's interval
    n_unscored: int | None = None

    @property
    def n(self) -> int:
        """Number of values."""
        return int(self.sums[:, -1].sum())

    def at(self, settings: MetricSettings, factor: float) -> tuple[float, Interval | None]:
        """Return the value and its interval."""
        value = float(self.statistic(self.sums.sum(axis=0)))
        if self.skewed:
            return value, settings.skewed_interval(self.sums[:, 0], self.sums[:, -1])
        return value, settings.interval(self.sums, self.statistic)


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
            value, interval = estimate.at(inputs.settings, 100.0 if key.unit == "percent" else 1.0)
            unscored = n_unscored if estimate.n_unscored is None else estimate.n_unscored
            results.append(subset.result(key.name, value, interval, n=estimate.n, level=level, n_unscored=unscored))
    return results
