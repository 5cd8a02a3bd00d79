"""How much of a difference is the luck of one make: the variance between makes of a variant, beside that over items."""

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from mlflow_compress.metrics.stats.arrays import Float, Int
from mlflow_compress.metrics.stats.intervals import FEWEST_GROUPS, effective_groups, group_sums


@dataclass(frozen=True, kw_only=True)
class MakeSpread:
    """How a mean per item varies between makes of one variant, and over items; standard deviations in its own unit."""

    mean: float  # Over all items and makes
    between: float  # Between makes: 0 where they differ no more than their items' sampling explains
    low: float  # 95 % interval of it
    high: float
    items: float  # Of the mean of these makes over other items
    n_makes: int
    n_items: int  # Items that all makes have


def _variance_of_mean(values: Float, groups: Int) -> float:
    """Return the variance of the mean of values (n,) over groups of items, as `design_effect` has it."""
    sums, sizes = group_sums(values, groups)
    e = sums - float(values.mean()) * sizes
    return len(sums) / (len(sums) - 1.0) * float((e**2).sum()) / len(values) ** 2


def variance_of_makes(makes: Float, groups: Int) -> tuple[float, float]:
    """Return the variance of the makes' means, and its part that the sampling of items explains."""
    y = makes - makes[0]  # what the items have in common is gone: equal makes differ by exactly 0
    means = y.mean(axis=1)
    rest = y - means[:, None] - y.mean(axis=0) + y.mean()
    inside = sum(_variance_of_mean(row, groups) for row in rest) / (len(makes) - 1)
    return float(means.var(ddof=1)), inside


def make_spread(makes: Float, groups: Int) -> MakeSpread | None:
    """Return the spread between K makes of a variant, from its value per make and item, shape (K, n).

    The model is ``x_ki = mu + a_k + b_i + c_ki``: the luck a_k of a make, what the items have in common, and how a make
    happens to fall out on an item. All makes have the same items, so b cancels in their means' variance, of which
    ``E s^2 = var(a) + q``. Here q is the sampling variance of c in one mean: half of the variance of a paired
    difference of two makes, averaged over all pairs, between groups of items (`groups`, shape (n,)). So

        ``between^2 = max(0, s^2 - q)``, interval ``max(0, (K - 1) s^2/chi2 - q)`` at both ends of chi2(K - 1)

    which takes q for known: it has n - 1 times as many degrees of freedom. `benchmarks/calibration_luck.py` simulates
    it: s^2 - q is 98 to 103 % of var(a) on average, q 100 %, and the interval covers 95 to 98 %. Zero in place of what
    is negative makes between^2 too large where makes differ little (by 24 % with three makes whose luck is as large as
    q). None for one make, or for fewer than 20 groups of items.

    Source: Searle, Casella and McCulloch, "Variance Components", 1992, chapter 4 (the two-way crossed model; a negative
    estimate is 0); Burdick and Graybill, "Confidence Intervals on Variance Components", 1992, for the interval.
    """
    n_makes, n_items = makes.shape
    if n_makes < 2 or effective_groups(np.unique(groups, return_counts=True)[1]) < FEWEST_GROUPS:
        return None
    square, inside = variance_of_makes(makes, groups)
    ends = (n_makes - 1) * square / (2 * special.gammaincinv((n_makes - 1) / 2, [0.975, 0.025])) - inside
    between, low, high = np.sqrt(np.maximum([square - inside, *ends], 0.0)).tolist()
    return MakeSpread(
        mean=float(makes.mean()),
        between=between,
        low=low,
        high=high,
        items=math.sqrt(_variance_of_mean(makes.mean(axis=0), groups)),
        n_makes=n_makes,
        n_items=n_items,
    )


def closer_probability(first: Float, second: Float, groups: Int) -> float | None:
    """Return the probability that a fresh make of the first variant has a smaller mean than one of the second.

    Both arrays have shape (makes, n), of the same n items. One row alone is of a variant that every make gives again.
    With the difference D of the mean over all makes and items, its paired sampling variance v over (groups of) items,
    and `make_spread`'s s^2 and q of each variant with K > 1 makes, a fresh difference is ``D + sqrt(V) T``:

        ``V = v + sum((1 + 1/K) max(0, s^2 - q))``, and T has Student's distribution with
        ``V^2 / (v^2/(G - 1) + sum((1 + 1/K)^2 (s^4/(K - 1) + q^2/((K - 1)(G - 1)))))`` degrees of freedom

    for G groups: the luck of a fresh make, that of the K makes in the mean, and that of the items. It is
    ``P(T < -D/sqrt(V))``. Simulated, 93 to 99 % of fresh differences lie where it says that 95 % do, and of what it
    says with 95 % and more 1 to 4 % is wrong (`benchmarks/calibration_luck.py`). None for fewer than 20 groups, and
    where nothing varies.

    Source: Searle, Casella and McCulloch, "Variance Components", 1992, chapters 4 and 7 (prediction of a random
    effect); Satterthwaite, "An approximate distribution of estimates of variance components", 1946.
    """
    count = effective_groups(np.unique(groups, return_counts=True)[1])
    if count < FEWEST_GROUPS:
        return None
    difference = first.mean(axis=0) - second.mean(axis=0)
    variance = _variance_of_mean(difference, groups)
    doubt = variance**2 / (count - 1)
    for makes in (first, second):
        if (df := len(makes) - 1) > 0:
            square, inside = variance_of_makes(makes, groups)
            factor = 1 + 1 / len(makes)
            variance += factor * max(0.0, square - inside)
            doubt += factor**2 * (square**2 / df + inside**2 / (df * (count - 1)))
    if variance == 0.0:
        return None
    return float(special.stdtr(variance**2 / doubt, -difference.mean() / math.sqrt(variance)))
