"""Items drawn from strata with known probabilities: how many of which stratum, and estimates that weight them.

Items that hardly can flip say little about a variant. So the items are sorted into strata by the baseline's lead, which
is known before a variant is scored, and more are drawn where items flip. An item of a stratum of N_h
items, of which n_h are drawn, then stands for w = N_h/n_h items.

Every estimate has two readings. "benchmark" is the mean of these N items, of which all are known in the end, so that no
uncertainty is left. "population" is that of what the N items are themselves a sample of, as every other interval of
this package is; with all items it is the plain interval.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import special

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.stats.arrays import Float, Int, finite, same_length
from mlflow_compress.metrics.stats.flip_model import GUESS
from mlflow_compress.metrics.stats.intervals import DesignEffect, are_grouped, design_effect

EstimateOf = Literal["population", "benchmark"]

_N_STRATA = 10
FEWEST = 2
"""Fewest items that are drawn from a stratum: from one item there is no variance."""

NEARLY_ALL = 0.7  # A round that needs this share of the items takes all: another round would cost more than they do

EARLY = 0.2
"""Share of the error that each look before all items may make, of at most four: so of one end of an interval, 2.5 %
with all items, it is at most 4.5 % with all looks together.

Source: Haybittle, British Journal of Radiology 1971; Peto et al., British Journal of Cancer 1976.
"""

_PRIOR_ITEMS = 30.0
"""As many items a stratum's expected share of flips counts as: a stratum in which none was seen still varies.

Its few items do not know its variance, and the model of all strata knows more: with 4 intervals of flips that do not
follow the lead hold in 90 to 93 %, with 30 in 91 to 99 % (`benchmarks/drawn_items.py`).
"""

_LEAST_FLIPS = 0.03
"""No stratum is expected to have a smaller share of flips than this part of all items' share, or than its square.

A model of flips by lead knows nothing of what else makes items flip: without this, intervals of the benchmark's own
flips would be too narrow. A variant with few flips shows hardly any that the model has not expected, therefore the
square. Both were chosen with a look at all variants of `benchmarks/margin_sampling.py`, which prints what they cover.
"""


def lead_strata(leads: npt.ArrayLike, count: int = _N_STRATA) -> Int:
    """Return the stratum of each item: from the smallest lead upwards, and last the items without one (NaN).

    Each stratum has an equal part of the deviation ``sum(sqrt(p (1 - p)))`` that `GUESS` expects: the smaller the lead,
    the fewer items. Equal leads are in one stratum.

    Source: Dalenius and Hodges, "Minimum variance stratification", JASA 1959.

    Examples
    --------
    >>> lead_strata([0.1, 5.0, 0.2, 4.0, 6.0, 7.0, np.nan, np.nan], 2).tolist()
    [0, 1, 0, 1, 1, 1, 2, 2]
    """
    x = np.asarray(leads, dtype=np.float64)
    there = np.isfinite(x)
    codes = np.full(len(x), count, dtype=np.int64)
    values, place, n = np.unique(x[there], return_inverse=True, return_counts=True)
    p = GUESS.probability(values)
    spread = n * np.sqrt(p * (1 - p)) + 1e-300  # never all 0
    codes[there] = (count * (np.cumsum(spread) - spread / 2) / spread.sum()).astype(np.int64)[place]
    return np.asarray(np.unique(codes, return_inverse=True)[1], dtype=np.int64)


def allocate(sizes: npt.ArrayLike, deviations: npt.ArrayLike, total: int, *, drawn: npt.ArrayLike = 0) -> Int:
    """Return how many items to draw from each stratum, `total` in all: Neyman's allocation, ``n_h ~ N_h S_h``.

    It minimises the variance ``sum(N_h² S_h²/n_h)`` of a stratified mean. No stratum has more than its N_h items, nor
    fewer than were `drawn` already, or `FEWEST`. Where these bounds need more items than `total`, the bounds are kept.

    - `sizes`, `deviations` (n_strata,): N_h, and the standard deviation S_h of an item's value within the stratum.

    Source: Neyman, "On the two different aspects of the representative method", JRSS 1934.

    Examples
    --------
    >>> allocate([100, 100], [0.3, 0.1], 40).tolist()
    [30, 10]
    """
    n, s = np.asarray(sizes, dtype=np.int64), finite("deviations", deviations)
    same_length(sizes=n, deviations=s)
    least = np.minimum(np.maximum(np.broadcast_to(np.asarray(drawn, dtype=np.int64), n.shape), FEWEST), n)
    total = int(min(max(total, least.sum()), n.sum()))
    share = n * s if (n * s).sum() > 0 else n.astype(np.float64)
    share = np.maximum(share, 1e-9 * n * share.sum() / n.sum())  # an empty claim still takes what the others leave
    # The largest factor whose shares, kept within their bounds, are not more than the total; then the rest, one by one.
    low, high = 0.0, float((n / share).max())
    for _ in range(60):
        middle = (low + high) / 2
        fits = np.clip(np.floor(share * middle), least, n).sum() <= total
        low, high = (middle, high) if fits else (low, middle)
    counts = np.clip(np.floor(share * low), least, n).astype(np.int64)
    while (left := total - int(counts.sum())) > 0:
        open_ = np.flatnonzero(counts < n)
        order = open_[np.argsort(counts[open_] - share[open_] * low, kind="stable")]
        counts[order[:left]] += 1
    return np.asarray(counts, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Design:
    """How each item of a sample, or of a part of one, was drawn: row i is item i; every array has shape (n,)."""

    stratum: Int  # Code of its stratum
    size: Int  # Items of the benchmark in the stratum
    drawn: Int  # Items of the sample in the stratum, in this part of the sample or not
    # Probability that an item of the stratum flips, by a model of all strata; None where there is no such model
    flips: Float | None = None

    def __post_init__(self) -> None:
        same_length(stratum=self.stratum, size=self.size, drawn=self.drawn)
        _, first, codes = np.unique(self.stratum, return_index=True, return_inverse=True)
        counts = np.bincount(codes)[codes]
        if ((self.size != self.size[first][codes]) | (self.drawn != self.drawn[first][codes])).any():
            raise DataError("Items of one stratum do not agree on how many items it has")
        if (counts > self.drawn).any() or (self.drawn > self.size).any():
            raise DataError(
                "A stratum has more items than were drawn from it", allowed="items here <= items drawn <= its items"
            )

    def __len__(self) -> int:
        return len(self.stratum)

    @property
    def n_items(self) -> int:
        """Items of all these strata, drawn or not."""
        return int(self.size[np.unique(self.stratum, return_index=True)[1]].sum())

    def __getitem__(self, rows: npt.NDArray[np.bool_] | Int) -> "Design":
        """Return the design of some of the items: of a task, or of those with a value."""
        flips = None if self.flips is None else self.flips[rows]
        return Design(self.stratum[rows], self.size[rows], self.drawn[rows], flips)

    @property
    def weight(self) -> Float:
        """Items of the benchmark that each item stands for: one over the probability by which it was drawn."""
        return np.asarray(self.size / self.drawn, dtype=np.float64)

    @property
    def is_whole(self) -> bool:
        """Whether every item of these strata was drawn, so that nothing is weighted."""
        return bool((self.drawn == self.size).all())


@dataclass(frozen=True, eq=False)
class Units:
    """What an estimate knows of its items besides their values; row i is item i."""

    groups: Int  # Code of the group that an item is in; shape (n,)
    design: Design | None = None  # How they were drawn; None where all were scored

    def __getitem__(self, rows: npt.NDArray[np.bool_] | Int) -> "Units":
        """Return the same of some of the items."""
        return Units(self.groups[rows], None if self.design is None else self.design[rows])


@dataclass(frozen=True, kw_only=True)
class WeightedMean:
    """A mean of items that were drawn by a design, and how much it would vary."""

    value: float
    benchmark: float  # Variance as an estimate of the benchmark's mean; 0 where all items were drawn
    population: float  # Variance as an estimate of the mean of what the benchmark is a sample of
    df: float  # Degrees of freedom of these variances, for Student's t
    n: int  # Items with a value
    spread: float  # Variance of one value

    def variance(self, reading: EstimateOf) -> float:
        """Return the variance of one of the readings."""
        return self.benchmark if reading == "benchmark" else self.population

    n_groups: int  # By `effective_groups`; of items that stand alone their number

    def effect(self, reading: EstimateOf) -> DesignEffect:
        """Return by how much the estimate varies more, or less, than the mean of `n` items drawn at random.

        Values that are all equal say nothing of it. As more items are drawn where they flip, as many drawn at
        random would not be more likely to show one: the effect is 1 then.
        """
        simple = self.spread / self.n
        return DesignEffect(self.variance(reading) / simple if simple > 0 else 1.0, self.df, self.n_groups)

    @property
    def p_value(self) -> float:
        """Two-sided p-value of "the mean for the population is 0", by Student's test."""
        if self.population == 0.0:
            return 1.0
        return float(2 * special.stdtr(self.df, -abs(self.value) / self.population**0.5))


def weighted_mean(values: npt.ArrayLike, design: Design, groups: Int | None = None) -> WeightedMean:
    """Return the mean of items of a design, each weighted by what it stands for, with its variances.

    With weights w, the value is ``m = sum(w x)/sum(w)`` (Hajek's estimator): of whole strata it is the stratified mean
    ``sum W_h mean_h``, and the same for the items of a task or a category, whose number among the items that were not
    drawn need not be known. With ``z = w (x - m)/sum(w)``, and 0 for items of the sample that are not of this part,

    - the variance for the benchmark is ``sum_h (1 - n_h/N_h) n_h/(n_h - 1) (sum(z²) - sum(z)²/n_h)``, which is
      ``sum W_h² s_h²/n_h (1 - n_h/N_h)`` for whole strata;
    - that for the population has ``deff s²/N`` added, the variance of the benchmark's own mean: s² is the weighted
      variance of the values, N = sum(w), and `deff` the design effect that `groups` have among all items, 1 without.
      The benchmark is a sample itself, and which items of it were drawn is the second phase.

    A stratum without an event seems to have no variance. So where values are events (-1, 0 or 1) and the design says
    how probable a flip is in a stratum, that counts as much as `_PRIOR_ITEMS` items, if it makes the variance larger.
    It is at least `_LEAST_FLIPS` of the share of events, or at least the square of that share where this is less.

    Source: Cochran, "Sampling techniques", 1977, 5A.14 (domains) and 12.2 (double sampling); Hajek, 1971.

    Examples
    --------
    >>> half = Design(np.array([0, 0, 1, 1]), np.array([4, 4, 8, 8]), np.array([2, 2, 2, 2]))
    >>> weighted_mean([1, 0, 0, 0], half).value  # 4/12 * 1/2 + 8/12 * 0
    0.16666666666666666
    """
    x = finite("values", values)
    same_length(values=x, design=design.stratum)
    w = design.weight
    total = float(w.sum())
    value = float(w @ x / total)
    spread = float(w @ (x - value) ** 2 / total)
    z = w * (x - value) / total
    _, first, codes = np.unique(design.stratum, return_index=True, return_inverse=True)
    drawn, size = design.drawn[first].astype(np.float64), design.size[first].astype(np.float64)
    squares, sums = np.bincount(codes, weights=z * z), np.bincount(codes, weights=z)
    within = np.maximum(squares - sums**2 / drawn, 0.0) / np.maximum(drawn - 1, 1)
    if design.flips is not None and np.isin(x, (-1, 0, 1)).all():
        events, here = float(w @ x**2) / total, np.bincount(codes) / drawn
        q = np.maximum(design.flips[first], min(_LEAST_FLIPS, events) * events)
        expected = (size / drawn / total) ** 2 * q * (1 - q) * here
        shrunk = ((drawn - 1) * within + _PRIOR_ITEMS * expected) / (drawn - 1 + _PRIOR_ITEMS)
        within = np.maximum(within, shrunk)

    parts = (1 - drawn / size) * drawn * within
    benchmark = float(parts.sum())
    effect, df, n_groups = 1.0, float(len(x) - 1), len(x)
    if groups is not None and are_grouped(groups):
        effect, df, n_groups = design_effect(x, groups, w)
    own = effect * spread / total
    # Satterthwaite's approximation: the strata's variances are known from few items each.
    terms = [*(parts**2 / np.maximum(drawn - 1, 1)), own**2 / max(df, 1.0)]
    variance = benchmark + own
    freedom = variance**2 / sum(terms) if sum(terms) > 0 else df
    return WeightedMean(
        value=value,
        benchmark=benchmark,
        population=variance,
        df=max(1.0, min(freedom, len(x) - 1.0)) if len(x) > 1 else 1.0,
        n=len(x),
        spread=spread,
        n_groups=n_groups,
    )


def as_if_independent(values: npt.ArrayLike, design: Design, variance: float) -> Float:
    """Return n numbers whose mean is the weighted mean, and whose mean varies by `variance` if they are independent.

    They are the weighted residuals from the strata's means, in the scale that gives this variance. So a bootstrap over
    them has the skewness that the weighted mean has.
    """
    x, w = finite("values", values), design.weight
    mean = float(w @ x / w.sum())
    _, codes = np.unique(design.stratum, return_inverse=True)
    inside = np.bincount(codes, weights=x)[codes] / np.bincount(codes)[codes]
    residual = w * (x - inside) * np.sqrt(1 - design.drawn / design.size)
    own = float(residual @ residual)
    scale = (variance * len(x) ** 2 / own) ** 0.5 if own > 0 else 0.0
    return np.asarray(mean + scale * residual, dtype=np.float64)
