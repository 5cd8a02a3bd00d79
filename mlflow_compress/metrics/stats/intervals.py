"""Score intervals for proportions: Wilson for one sample, Tango for the difference of two paired ones.

And what items share: how much less a sample says whose items come in groups, such as the questions of one passage.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics.stats.arrays import Float, Int, finite, moderate, same_length

FEWEST_GROUPS = 20
"""Fewest groups, counted by `effective_groups`, that have an interval: the variance between fewer is hardly known."""


def effective_groups(sizes: npt.ArrayLike) -> int:
    """Return how many groups of one size groups of these sizes, shape (n_groups,), count as: ``sum(n)^2/sum(n^2)``.

    The number is rounded, so that 20 groups of which one lacks an item are 20.

    Source: Kish, "Survey Sampling", 1965.

    Examples
    --------
    >>> effective_groups([30] + [1] * 70)
    10
    """
    n = np.asarray(sizes, dtype=np.float64)
    return round(float(n.sum() ** 2 / (n @ n)))


class DesignEffect(NamedTuple):
    """How the mean of grouped values varies, against that of as many independent ones."""

    effect: float  # Variance of the mean over that of independent values, at least 1
    df: float  # Degrees of freedom of that variance, for Student's t
    n_groups: int  # By `effective_groups`


def group_sums(values: npt.ArrayLike, groups: npt.ArrayLike) -> tuple[Float, Float]:
    """Return the sum of the values in each group, and the groups' sizes, both of shape (n_groups,)."""
    x = finite("values", values)
    same_length(values=x, groups=np.asarray(groups))
    _, codes = np.unique(np.asarray(groups), return_inverse=True)
    return np.bincount(codes, weights=x).astype(np.float64), np.bincount(codes).astype(np.float64)


def are_grouped(groups: Int | None) -> bool:
    """Return whether any two of the items are in one group."""
    return groups is not None and len(np.unique(groups)) < len(groups)


def design_effect(
    values: npt.ArrayLike,
    groups: npt.ArrayLike,
    weights: Float | None = None,
    *,
    rare: bool = False,
    even: bool = False,
) -> DesignEffect:
    """Return the design effect of a mean of n values in G groups, both arrays of shape (n,).

    It is the larger one of two. With the mean m, group sums s_g and sizes n_g, ``e_g = s_g - m n_g``, the variance of
    the mean between groups is ``v = G/(G - 1) sum(e_g^2)/n^2``, and the first effect ``v / (sum((x - m)^2)/n^2)``.
    Where few groups hold most items only these speak in v: a share in 300 groups of geometric sizes was covered in 84
    to 95 % of the draws. So the second takes the correlation r of two items of a group from all groups alike, ``1 + r
    (sum(n_g^2)/n - 1)`` with ``r = sum((e_g^2 - q_g)/(n_g - 1))/sum(q_g)`` over groups of several items and ``q_g =
    sum((x - m)^2)`` in a group. Below 1 the effect is 1: groups that happen to be more alike than chance makes them do
    not add items. Values that are all equal show no correlation; the groups count in their place, ``sum(n_g^2)/n``,
    which is n/G for groups of one size.

    Of rare events (`rare`) few groups have any, and of these the largest ones perhaps none: they show no correlation
    though there is one. Then r is at least ``1/(2 (K + 1))``, what half the pairs of one more group would make it, were
    they alike; K is ``sum(q)^2/sum(q^2)``, as how many groups those with events count. Without it the upper end for
    flips of 2 % in groups of geometric sizes is too low in 4 to 9 % of the draws, where 2.5 are due, and with it in at
    most 1.5 %; where 40 groups and more have events nothing changes.

    Of items that were drawn, `weights` (n,) has how many each stands for, and the effect is that of all items: sums,
    sizes and mean are weighted, and ``sum(w (w - 1) (x - m)^2)`` is taken from ``sum(e_g^2)``, so that an item stands
    for w that are no more alike than others, and two items of a group for the pairs there (Horvitz and Thompson).

    The variance of v is that of a sum dominated by its largest terms where few groups have events, so that t(G - 1) is
    too narrow (a share of 2 % in groups of 1 to 40 was covered in 81 % of the draws). The degrees of freedom are
    ``min(G - 1, 1.2 sum(e^2)^2/sum(e^4))``: of the quotient alone, Satterthwaite's approximation with the terms' own
    fourth moments, 20 groups are up to 20 % wider, and with 1.5 in place of 1.2 up to 5.7 % of upper ends are too low,
    where 2.5 % are due (`benchmarks/interval_edges.py`). Groups of about one size (`even`), as the answers drawn to
    each question are, have 3 in its place, with which G normal sums count as G: intervals over 40 questions are 5 %
    narrower, up to 60 % where few questions have events, and still hold (`benchmarks/thinking_coverage.py`).

    Source: Rao and Scott, "A simple method for the analysis of clustered binary data", Biometrics 1992; Karlin, Cameron
    and Williams, "Sibling and parent-offspring correlation estimation with variable family size", PNAS 1981;
    Satterthwaite, "An approximate distribution of estimates of variance components", 1946; the factors are this
    project's.

    Examples
    --------
    >>> design_effect([1, 1, 0, 0], [0, 0, 1, 1]).effect
    4.0
    """
    x = moderate("values", values)
    w = np.ones(len(x)) if weights is None else finite("weights", weights)
    same_length(values=x, weights=w, groups=np.asarray(groups))
    codes = np.unique(np.asarray(groups), return_inverse=True)[1]
    deviation = x - float(x.mean() if weights is None else w @ x / w.sum())

    def by_group(items: Float) -> Float:
        return np.bincount(codes, weights=items).astype(np.float64)

    sizes, e, within = by_group(w), by_group(w * deviation), by_group(w * deviation**2)
    count, square, between = len(sizes), float(within.sum()), float(e @ e)
    of_size = float(sizes @ sizes - (w * (w - 1)).sum()) / float(w.sum())
    effective = effective_groups(sizes)
    if square == 0.0 or between == 0.0 or count < 2:
        return DesignEffect(of_size if square == 0.0 else 1.0, max(count - 1.0, 1.0), effective)
    several = np.bincount(codes) > 1
    pairs, alike = sizes**2 - by_group(w * w), e**2 - by_group((w * deviation) ** 2)
    own = float(within[several].sum())
    correlation = float((sizes * alike)[several] @ (1.0 / pairs[several])) / own if own > 0.0 else 0.0
    if own > 0.0 and rare:
        correlation = max(correlation, 0.5 / (own**2 / float(within[several] @ within[several]) + 1.0))
    df = max(1.0, min(count - 1.0, (3.0 if even else 1.2) * between**2 / float((e**4).sum())))
    between -= float((w * (w - 1) * deviation**2).sum())
    robust = count / (count - 1.0) * between / square
    return DesignEffect(max(1.0, robust, 1.0 + correlation * (of_size - 1.0)), df, effective)


class Interval(NamedTuple):
    """Lower and upper bound."""

    low: float
    high: float


def check_level(level: float) -> None:
    """Refuse a confidence level that is not strictly between 0 and 1."""
    if not 0.0 < level < 1.0:
        raise ConfigError("The confidence level must lie strictly between 0 and 1", got=level)


def z_value(level: float) -> float:
    """Return the two-sided standard normal quantile of a confidence level, 1.96 for 0.95."""
    check_level(level)
    return float(special.ndtri(0.5 + level / 2.0))


def _t_value(level: float, df: float) -> float:
    """Return the two-sided quantile of Student's t."""
    check_level(level)
    return float(special.stdtrit(df, 0.5 + level / 2.0))


def wilson(successes: float, n: int, *, level: float = 0.95, effect: DesignEffect | None = None) -> Interval:
    """Wilson score interval of a proportion.

    ``(p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)`` with ``p = successes/n``; never empty at p = 0 or 1. Of
    items in groups, or drawn with unequal probabilities, n is divided by the design effect `effect`, and z is the
    quantile of Student's t with its degrees of freedom; `successes` is then n times the weighted share.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference", JASA 1927; Rao and Scott,
    "A simple method for the analysis of clustered binary data", Biometrics 1992.

    Examples
    --------
    >>> [round(x, 4) for x in wilson(8, 10)]
    [0.4902, 0.9433]
    """
    if n < 1 or not 0 <= successes <= n:
        raise DataError("A proportion needs 0 <= successes <= n and n >= 1", got=f"{successes} of {n}")
    share = successes / n
    if effect is None:
        z, count = z_value(level), float(n)
    elif effect.effect == 0.0:  # nothing is left to vary: all items of the benchmark were drawn
        return Interval(share, share)
    else:
        z, count = _t_value(level, effect.df), n / effect.effect
    scale = 2 * (count + z**2)
    middle = (2 * count * share + z**2) / scale
    half = z / scale * math.sqrt(4 * count * share * (1 - share) + z**2)
    return Interval(0.0 if successes == 0 else middle - half, 1.0 if successes == n else middle + half)


def share_interval(successes: float, n: int, *, level: float = 0.95, effect: DesignEffect | None = None) -> Interval:
    """Return the interval of a share: Wilson's, with Clopper and Pearson's end on the side of the nearer bound.

    Wilson's end there is off the bound after a single event, so that it covers 88 % where 0.5 % of items have it and 20
    are seen. Clopper and Pearson's is the share at which so many events or more have a probability of 2.5 %. The other
    end, which gates of rare events read, is Wilson's. Of items in groups both count n over the design effect (Korn and
    Graubard).

    Source: as `wilson`; Clopper and Pearson, Biometrika 1934; Korn and Graubard, "Confidence intervals for proportions
    with small expected number of positive counts", Survey Methodology 1998.

    Examples
    --------
    >>> [round(x, 4) for x in share_interval(1, 20)]
    [0.0013, 0.2361]
    """
    low, high = wilson(successes, n, level=level, effect=effect)
    rare = min(successes, n - successes)
    if not 0.0 < rare < n / 2.0 or low == high:
        return Interval(low, high)
    of_item, z = (1.0, z_value(level)) if effect is None else (1.0 / effect.effect, _t_value(level, effect.df))
    end = float(special.betaincinv(of_item * rare, of_item * (n - rare) + 1.0, special.ndtr(-z)))
    return Interval(end, high) if successes < n - successes else Interval(low, 1.0 - end)


_MOST_ITEMS = 1e15  # whose counts a float holds exactly


def paired_difference(
    gained: float, lost: float, n: float, *, level: float = 0.95, effect: DesignEffect | None = None
) -> Interval:
    """Tango's score interval of ``(gained - lost)/n``, the difference of two paired proportions.

    The set of `d` with ``|gained - lost - n d| <= z sqrt(n (2 q(d) + d (1 - d)))``, where `q(d)` is the
    maximum-likelihood estimate of the lost share given `d`. Unlike the bootstrap it does not collapse to a point when
    nothing changed. Only the second model has the `gained` items right, only the first the `lost` ones. Of items in
    groups all three counts are divided by the design effect of the differences, and z is Student's t (see `wilson`).

    Source: Tango, "Equivalence test and confidence interval for the difference in proportions for the paired-sample
    design", Statistics in Medicine 1998.
    """
    if not (0 < n <= _MOST_ITEMS and gained >= 0 and lost >= 0 and gained + lost <= n * (1 + 1e-12)):
        allowed = f"gained, lost >= 0, gained + lost <= n, and n from above 0 to {_MOST_ITEMS:.0e}"
        raise DataError("These are no counts of pairs", allowed=allowed, got=f"{gained}, {lost}, {n}")
    z = z_value(level)
    if effect is not None and effect.effect == 0.0:
        return Interval((gained - lost) / n, (gained - lost) / n)
    if effect is not None:
        z, gained, lost, n = _t_value(level, effect.df), *(count / effect.effect for count in (gained, lost, n))

    from scipy.optimize import brentq  # 0.3 s, which a command that finds everything done does not wait for

    def spread(d: float) -> float:
        b = (2 * n - gained + lost) * d - gained - lost
        root = math.sqrt(max(b * b + 8 * n * lost * d * (1 - d), 0.0))
        q = (root - b) / (4 * n)
        return z * math.sqrt(max(n * (2 * q + d * (1 - d)), 0.0))

    estimate = (gained - lost) / n

    def solve(sign: float, end: float) -> float:
        def excess(d: float) -> float:
            return gained - lost - n * d - sign * spread(d)

        # Just off the estimate, because both sides vanish on it where nothing changed; the root is further out.
        start = estimate - sign * 1e-9
        if estimate == end or excess(start) * excess(end) >= 0.0:
            return end
        return float(brentq(excess, min(start, end), max(start, end), xtol=1e-12))

    return Interval(solve(1.0, -1.0), solve(-1.0, 1.0))


_STEPS = 40  # bisections
_ROUNDING = 1e-6  # of the range: by so much a mean of float32 values may leave its bounds


def bounded_mean_interval(
    values: npt.ArrayLike,
    sizes: npt.ArrayLike | None = None,
    *,
    count: float | None = None,
    low: float = 0.0,
    high: float = 1.0,
    level: float = 0.95,
) -> Interval:
    """Return an interval for the mean of n independent values in ``[low, high]``: Gaffke's, which has no width 0.

    With `sizes`, shape (n,), the values are sums over groups of so many items, and the mean is that of the items; the
    groups are independent, and what an item cannot exceed, a group's mean cannot.

    A value that was not seen may be as bad as the range allows. So the upper end is the quantile of ``sum(D_i x_i)``
    over the values and one more, `high`, where D is uniform over all weights that sum to 1 (Dirichlet's distribution);
    the lower end is the same for ``low + high - x``. Of values at both ends of the range alone it is Clopper and
    Pearson's interval. Groups of unequal sizes n_g have Dirichlet's parameters ``n_g sum(n)/sum(n^2)``: they count as
    ``sum(n)^2/sum(n^2)`` of one size, and the one that was not seen has that size. `count` is another number of values
    that they count as: of items that were drawn with the weights `sizes`, that of items over the design effect.

    That it holds for every distribution is proved for n = 2, and for values at both ends; no counter-example is known
    (`benchmarks/interval_edges.py` simulates it). The quantile is the saddlepoint approximation's. It errs to the wide
    side: by 0.5 % of the end that is farther from its bound, by 2.3 % of the other. Nothing is drawn.

    Source: Gaffke, "Three test statistics for a nonparametric one-sided hypothesis on the mean of a nonnegative
    variable", Mathematical Methods of Statistics 2005; Learned-Miller and Thomas, "A new confidence interval for the
    mean of a bounded random variable", 2019. Barndorff-Nielsen, "Inference on full or partial parameters based on the
    standardized signed log likelihood ratio", Biometrika 1986. The weights of unequal groups are this project's.
    """
    if not -math.inf < low < high < math.inf:
        raise ConfigError("The bounds must be finite, the lower one below the upper one", got=f"[{low}, {high}]")
    x = finite("values", values)
    n = np.ones(len(x)) if sizes is None else finite("sizes", sizes)
    same_length(values=x, sizes=n)
    share = (x / n - low) / (high - low)
    if share.min() < -_ROUNDING or share.max() > 1.0 + _ROUNDING:
        got = f"{(x / n).min()} to {(x / n).max()}"
        raise DataError(f"Values must lie in [{low}, {high}]", got=got, fix="Clip them first")
    total = float(n.sum())
    share, counts = np.clip(share, 0.0, 1.0), n * ((total / float(n @ n)) if count is None else count / total)
    z = z_value(level)
    return Interval(
        low + (high - low) * _distance_from_one(share, counts, z),
        high - (high - low) * _distance_from_one(1.0 - share, counts, z),
    )


def bounded_ratio_interval(
    above: npt.ArrayLike, below: npt.ArrayLike, sizes: npt.ArrayLike | None = None, *, high: float, level: float = 0.95
) -> Interval:
    """Return an interval for ``mean(a)/mean(b)`` of pairs in ``[0, high]``, which allows for pairs that were not seen.

    The ratio is at most r where ``mean(a - r b)`` is at most 0. Its values lie in ``[-r high, high]``, so the upper end
    is the r at which that of `bounded_mean_interval` is 0, and infinite where there is none; the lower end is one over
    that of b over a. It holds where every pair has the same ratio, of which a bootstrap says nothing. With `sizes`,
    shape (n,), a and b are sums over groups of so many pairs.

    Source: Fieller, "Some problems in interval estimation", JRSS-B 1954, with Gaffke's interval in place of Student's.
    """
    a, b = finite("values above", above), finite("values below", below)

    def upper_end(a: Float, b: Float) -> float:
        low, most = 0.0, math.inf
        for _ in range(_STEPS):
            ratio = 2.0 * low + 1.0 if most == math.inf else (low + most) / 2.0
            end = bounded_mean_interval(a - ratio * b, sizes, low=-ratio * high, high=high, level=level).high
            low, most = (ratio, most) if end > 0.0 else (low, ratio)
        return most

    inverse = upper_end(b, a)
    return Interval(1.0 / inverse, upper_end(a, b))


def _distance_from_one(y: Float, counts: Float, z: float) -> float:
    """Return ``1 - U`` for the upper end U of the mean of ``x = 1 - y``; the weights are Dirichlet(counts, 1).

    U is the m with ``P(sum(D (x - m)) <= 0) = Phi(z)``, and D is a vector of Gamma variables over their sum. So ``a =
    x - m`` has the cumulant function ``K(t) = -sum(c log(1 - a t))``. Where K' is 0, ``m`` follows from ``s = t/(1 +
    m t)``, which lies between 0 and 1: ``m = sum(c x/(1 - s x))/sum(c/(1 - s x))``. So s alone is searched.
    """
    y, counts = np.append(y, 0.0), np.append(counts, 1.0)
    least, most, mean = -40.0, 40.0, 0.0  # logit of s
    for _ in range(_STEPS):
        middle = (least + most) / 2.0
        s, rest = 1.0 / (1.0 + math.exp(-middle)), 1.0 / (1.0 + math.exp(middle))
        slope = rest + s * y  # 1 - s x
        weights = counts / slope
        mean = float(weights @ y / weights.sum())
        scale = rest + s * mean
        ratio = slope / scale  # 1 - a t
        root = math.sqrt(max(2.0 * float(counts @ np.log(ratio)), 0.0))
        length = s / scale * math.sqrt(float(counts @ ((mean - y) / ratio) ** 2))
        beyond = root > 1e-6 and root + math.log(length / root) / root >= z
        least, most = (least, middle) if beyond else (middle, most)
    return mean
