"""Tests and decisions: McNemar, Holm, non-inferiority, paired means, permuted parts, one end of an interval."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import special

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics.stats.arrays import Float, Int, finite, same_length
from mlflow_compress.metrics.stats.intervals import Interval, group_sums, z_value


def mcnemar_exact(c2w: int, w2c: int) -> float:
    """Two-sided exact McNemar p-value: the binomial test of `c2w` against `w2c` at 1/2.

    ``p = min(1, 2 P(X <= min(c2w, w2c)))`` with ``X ~ Binomial(c2w + w2c, 1/2)``; 1 where nothing changed.

    Source: McNemar, Psychometrika 1947.
    """
    if c2w < 0 or w2c < 0:
        raise DataError("Counts cannot be negative", got=f"{c2w}, {w2c}")
    if c2w + w2c == 0:
        return 1.0
    return min(1.0, 2.0 * float(special.bdtr(min(c2w, w2c), c2w + w2c, 0.5)))


def mcnemar_mid_p(c2w: int, w2c: int) -> float:
    """Two-sided mid-p value of McNemar's test: the exact one less the probability of what was observed.

    ``p = 2 P(X <= min(c2w, w2c)) - P(X = c2w)`` with ``X ~ Binomial(c2w + w2c, 1/2)``; for equal counts
    ``1 - P(X = c2w)/2``, and 1 where nothing changed. Unlike the exact test it agrees with Tango's interval: of 7,320
    tables 184 contradict each other by the exact test and 24 by this one, with p between 0.0501 and 0.0625.

    Source: Fagerland, Lydersen and Laake, "The McNemar test for binary matched-pairs data: mid-p and asymptotic are
    better than exact conditional", BMC Medical Research Methodology 2013.
    """
    exact = mcnemar_exact(c2w, w2c)
    if c2w + w2c == 0:
        return exact
    n, fewer = c2w + w2c, min(c2w, w2c)
    ways = special.gammaln(n + 1) - special.gammaln(fewer + 1) - special.gammaln(n - fewer + 1)
    observed = math.exp(ways - n * math.log(2))
    return exact - (observed / 2 if c2w == w2c else observed)


def grouped_mcnemar_mid_p(differences: npt.ArrayLike, groups: npt.ArrayLike) -> float:
    """Two-sided mid-p value of McNemar's test for items in groups: whole groups change sides.

    Under the hypothesis that neither model is the better one, the two can be exchanged in every group. So the sum S of
    the differences has the distribution of ``sum(±s_g)`` over the groups' sums s_g, each sign with a probability of
    1/2, and ``p = P(|S| > |s|) + P(|S| = |s|)/2``, counted exactly. Where every item is a group of its own it is
    `mcnemar_mid_p`. Both arrays have shape (n,); a difference is 1 for wrong to right, -1 for right to wrong, else 0.

    Source: Fisher, "The Design of Experiments", 1935, section 21; the mid-p value as in `mcnemar_mid_p`.
    """
    sums = np.rint(group_sums(differences, groups)[0]).astype(np.int64)
    shares = np.ones(1)  # Of the sums -width, ..., width
    for size in np.abs(sums[sums != 0]):
        shares = np.concatenate([shares, np.zeros(2 * size)]) / 2
        shares = shares + np.roll(shares, 2 * size)
    sizes = np.abs(np.arange(len(shares)) - len(shares) // 2)
    observed = abs(int(sums.sum()))
    if len(shares) == 1:
        return 1.0  # nothing changed, as in `mcnemar_mid_p`
    return float(min(shares[sizes > observed].sum() + shares[sizes == observed].sum() / 2, 1.0))


def holm(p_values: npt.ArrayLike) -> Float:
    """Return p-values adjusted by Holm's step-down rule, in the order given.

    With the p-values sorted upwards, ``adjusted_(i) = max_{j <= i} min(1, (m - j + 1) p_(j))``. The family-wise error
    rate stays at the level under any dependence. The values are those of statsmodels' `multipletests`, which collects
    garbage in every call and so takes 25 ms to half a second.

    Source: Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 1979.
    """
    p = finite("p-values", p_values)
    if (p < 0).any() or (p > 1).any():
        raise DataError("P-values must lie in [0, 1]", got=f"{p.min()} to {p.max()}")
    order = np.argsort(p)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1.0)
    return adjusted


def benjamini_hochberg(p_values: npt.ArrayLike) -> Float:
    """Return p-values adjusted by Benjamini and Hochberg's step-up rule, in the order given.

    With the p-values sorted upwards, ``adjusted_(i) = min_{j >= i} min(1, m p_(j) / j)``. Of those below a level, at
    most that share are false on average, where the tests are independent or positively dependent.

    Source: Benjamini and Hochberg, "Controlling the false discovery rate", JRSS-B 1995.
    """
    p = finite("p-values", p_values)
    if len(p) and (p.min() < 0 or p.max() > 1):
        raise DataError("P-values must lie in [0, 1]", got=f"{p.min()} to {p.max()}")
    order = np.argsort(p)
    adjusted = np.empty_like(p)
    steps = p[order] * len(p) / np.arange(1, len(p) + 1)
    adjusted[order] = np.minimum(np.minimum.accumulate(steps[::-1])[::-1], 1.0)
    return adjusted


def non_inferior(low: float, high: float, *, margin: float, direction: Literal["higher", "lower"]) -> bool:
    """Return whether a difference to the baseline, or a distance, is shown to be no worse than an accepted harm.

    Where lower is better (a distance): ``high <= margin``; where higher is (accuracy): ``low >= -margin``. The
    interval's bad end decides, never the point estimate, so a small sample fails instead of passing.
    """
    if margin < 0 or math.isnan(margin):
        raise ConfigError("A non-inferiority margin is the accepted harm and cannot be negative", got=margin)
    if not low <= high:
        raise DataError("An interval needs low <= high", got=f"{low}, {high}")
    return high <= margin if direction == "lower" else low >= -margin


@dataclass(frozen=True, kw_only=True)
class _PairedMean:
    """A mean of paired differences."""

    value: float  # The mean
    # It excludes 0 exactly where the p-value is below 1 minus the level; None where all differences are 0
    interval: Interval | None
    p_value: float  # Two-sided, of a mean of 0
    n: int  # Number of pairs


def paired_mean(differences: npt.ArrayLike, *, level: float = 0.95) -> _PairedMean | None:
    """Return the mean of paired differences, shape (n,), with Student's interval and p-value.

    None for fewer than two pairs. Where all differences are 0, p is 1 and there is no interval. Where they are all the
    same and not 0 nothing is known of their spread: None. The difference of two KLs per item is less skewed than
    either. On real values of 200 items and more, 5 % of equal variants are told apart, and the interval misses in 5 to
    6 % (`tests/unit/test_scoreboard_separation.py`). Student, Biometrika 1908.
    """
    d = finite("paired differences", differences)
    n = len(d)
    if n < 2:
        return None
    if np.ptp(d) <= 1e-12 * abs(d[0]):  # the same but for rounding
        return _PairedMean(value=0.0, interval=None, p_value=1.0, n=n) if d[0] == 0 else None
    # By hand: scipy.stats takes ten times as long, and 200 variants have 40,000 of these tests.
    mean, error = float(np.mean(d)), float(np.std(d, ddof=1)) / math.sqrt(n)
    half = float(special.stdtrit(n - 1, 0.5 + level / 2)) * error
    p = 2.0 * float(special.stdtr(n - 1, -abs(mean) / error))
    return _PairedMean(value=mean, interval=Interval(mean - half, mean + half), p_value=p, n=n)


@dataclass(frozen=True, kw_only=True)
class Flips:
    """Counts of changed answers."""

    n: int  # Items compared, and those that the baseline has right
    n_correct: int
    c2w: int  # Right to wrong, wrong to right
    w2c: int
    w2w: int | None  # Wrong to another wrong answer; None where answers are not chosen from options


def count_flips(
    correct_baseline: npt.ArrayLike,
    correct_variant: npt.ArrayLike,
    answer_baseline: npt.ArrayLike | None = None,
    answer_variant: npt.ArrayLike | None = None,
) -> Flips:
    """Count the transitions between two models' answers to the same items.

    ``c2w = #(c_b & !c_q)``, ``w2c = #(!c_b & c_q)``, ``w2w = #(!c_b & !c_q & a_b != a_q)``; without answers a, `w2w`
    is None. Every array has shape (n,).

    Source: Dutta et al., "Accuracy is Not All You Need", section 2 and table 2.
    """
    b, q = np.asarray(correct_baseline, dtype=bool), np.asarray(correct_variant, dtype=bool)
    n = same_length(correct_baseline=b, correct_variant=q)
    if n == 0:
        raise DataError("Flips of no items are undefined", fix="Compare at least one item")
    if (answer_baseline is None) != (answer_variant is None):
        raise DataError("Give the answers of both models or of neither")
    w2w = None
    if answer_baseline is not None and answer_variant is not None:
        a_b, a_q = np.asarray(answer_baseline), np.asarray(answer_variant)
        same_length(correct_baseline=b, answer_baseline=a_b, answer_variant=a_q)
        w2w = int((~b & ~q & (a_b != a_q)).sum())
    return Flips(n=n, n_correct=int(b.sum()), c2w=int((b & ~q).sum()), w2c=int((~b & q).sum()), w2w=w2w)


ERROR_RATE = 0.025
"""Probability that the truth lies beyond one end of a 95 % interval."""


@dataclass(frozen=True, kw_only=True)
class OneEnd:
    """A value, one end of its 95 % interval, and the range that the value can have at all.

    With a finite range the error is that of a share, whose variance is that at the limit: with all values mapped to
    ``[0, 1]``, ``z(x)^2 = (x - v)^2/(c x (1 - x))``, and c is such that ``z(end) = 1.96``. For Wilson's interval this
    is exact, with a design effect too. A mean without an upper limit, such as a KL, has an error on the scale of its
    logarithm, ``z(x) = 1.96 log(x/v)/log(end/v)``; a mean that may have either sign a plain one.

    Source: Wilson, JASA 1927 (the score interval solved for z instead of for the limit).
    """

    value: float
    end: float
    low: float
    high: float
    upper: bool  # Whether it is the upper end: the truth is to lie below a limit. The two can be equal to the value

    def p_value(self, limit: float) -> float:
        """Return the probability of a value this far on the good side of `limit`, if the truth were at the limit.

        It is at most 0.025 exactly where the end keeps to the limit. On the wrong side of the value it is 1.
        """
        if limit == self.value:
            return 0.0 if self.end == self.value else 1.0
        if (limit < self.value) == self.upper:
            return 1.0
        return float(special.ndtr(-self._z(limit)))

    def _z(self, limit: float) -> float:
        if self.end == self.value or not self.low < limit < self.high:
            return math.inf
        if math.isfinite(self.low + self.high):
            x, v, u = self._share(limit), self._share(self.value), self._share(self.end)
            if not 0.0 < u < 1.0:
                return 0.0
            return z_value(0.95) * abs(x - v) / abs(u - v) * math.sqrt(u * (1 - u) / (x * (1 - x)))
        if self.low == 0.0 < self.value:
            return z_value(0.95) * math.log(limit / self.value) / math.log(self.end / self.value)
        return z_value(0.95) * (limit - self.value) / (self.end - self.value)

    def for_all(self, n: int) -> float:
        """Return the end that holds for n values at once with 97.5 %, whichever of them is chosen (Bonferroni)."""
        if self.end == self.value:
            return self.end
        k = (float(special.ndtri(ERROR_RATE / n)) / z_value(0.95)) ** 2
        if math.isfinite(self.low + self.high):
            v, u = self._share(self.value), self._share(self.end)
            if not 0.0 < u < 1.0:
                return self.end
            k *= (u - v) ** 2 / (u * (1 - u))
            # The solution of (x - v)^2 = k x (1 - x) on the end's side of the value.
            middle, root = 2 * v + k, math.sqrt(max((2 * v + k) ** 2 - 4 * (1 + k) * v * v, 0.0))
            share = (middle + math.copysign(root, u - v)) / (2 * (1 + k))
            return self.low + share * (self.high - self.low)
        if self.low == 0.0 < self.value:
            return float(self.value * (self.end / self.value) ** math.sqrt(k))
        return self.value + (self.end - self.value) * math.sqrt(k)

    def _share(self, x: float) -> float:
        return (x - self.low) / (self.high - self.low)


_PERMUTATIONS = 4999
_ENOUGH = 20
"""A part's p-value is known well enough when as many permutations reach its statistic."""

_CELLS = 2_000_000  # permuted values that are held at once: 4 MB


def larger_part_p(
    values: npt.ArrayLike,
    parts: npt.ArrayLike,
    groups: npt.ArrayLike | None = None,
    *,
    seed: int = 0,
) -> Float:
    """Return the one-sided p-value of every part 0, 1, ...: its mean is larger than that of the other items.

    A unit is what one group has in one part; a group in several parts makes their means more alike, so that the test
    errs towards no finding. Under the hypothesis that the parts are drawn from one population, every assignment of
    units to parts is equally likely. Compared are ``t = (r - r')/sqrt(v + v')``, with r the ratio of the units' sums to
    their sizes, ``r = sum(s)/sum(m)``, and ``v = sum((s - r m)²)/sum(m)²``, both of the part and of the rest: the test
    is exact under that hypothesis, and keeps its level in large samples where parts differ in spread alone.

    Permutations end when each part's statistic was reached `_ENOUGH` times, the last time by permutation l: its p-value
    is then ``ENOUGH/l``, else (1 + times reached)/(1 + `_PERMUTATIONS`).

    - `values`, `parts`, `groups` (n,): One value, the number of its part, and the code of its group for each item.

    Source: Janssen, "Studentized permutation tests", Statistics & Probability Letters 1997; Besag and Clifford,
    "Sequential Monte Carlo p-values", Biometrika 1991.
    """
    x, part = finite("values", values), np.asarray(parts, dtype=np.int64)
    same_length(values=x, parts=part)
    own = np.arange(len(x)) if groups is None else np.asarray(groups)
    same_length(values=x, groups=own)
    order = np.lexsort((own, part))
    x, part, own = x[order], part[order], own[order]
    first = np.flatnonzero(np.r_[True, (part[1:] != part[:-1]) | (own[1:] != own[:-1])])
    s = np.add.reduceat(x, first)
    m = np.diff(np.r_[first, len(x)]).astype(np.float64)
    starts = np.flatnonzero(np.r_[True, part[first][1:] != part[first][:-1]])
    if len(starts) < 2:
        return np.ones(len(starts))
    alone = bool((m == 1.0).all())
    seen = _statistics(s[None], None if alone else m[None], starts)[0]
    limit = seen - 1e-9 * np.abs(np.where(np.isfinite(seen), seen, 0.0))  # ties are equal but for rounding
    reached, ended = np.zeros(len(starts), dtype=np.int64), np.zeros(len(starts), dtype=np.int64)
    done = 0
    for chosen in _orders(len(s), seed):
        at_least = _statistics(s[chosen], None if alone else m[chosen], starts) >= limit
        counts = reached + np.cumsum(at_least, axis=0)
        now = (ended == 0) & (counts[-1] >= _ENOUGH)
        ended[now] = done + 1 + np.argmax(counts[:, now] >= _ENOUGH, axis=0)
        reached, done = counts[-1], done + len(chosen)
        if (ended > 0).all():
            break
    return np.where(ended > 0, _ENOUGH / np.maximum(ended, 1), (1 + reached) / (1 + done))


def _orders(n: int, seed: int) -> Iterator[Int]:
    """Iterate over random orders of n units in blocks of growing size, of shape (size, n)."""
    done, block = 0, 100
    while done < _PERMUTATIONS:
        rows = max(1, min(block, _PERMUTATIONS - done, _CELLS // n))
        yield _drawn(n, rows, done, seed)
        done, block = done + rows, 2 * block


@lru_cache(maxsize=16)
def _drawn(n: int, rows: int, after: int, seed: int) -> Int:
    """Return random orders; several distances of the same items share them, as drawing takes most of the time."""
    orders = np.tile(np.arange(n, dtype=np.min_scalar_type(n)), (rows, 1))
    return np.asarray(np.random.default_rng([seed, after]).permuted(orders, axis=1))


def _statistics(s: Float, m: Float | None, starts: Int) -> Float:
    """Return t of every part, shape (n_orders, n_parts), from the units' sums and sizes, shape (n_orders, n_units).

    Without sizes every unit is one item.
    """
    if m is None:
        own, squares = (np.add.reduceat(column, starts, axis=1) for column in (s, s * s))
        size = np.diff(np.r_[starts, s.shape[1]]).astype(np.float64)[None]
        inside = [own, size, squares, own, size]
    else:
        inside = [np.add.reduceat(column, starts, axis=1) for column in (s, m, s * s, s * m, m * m)]
    outside = [part.sum(axis=1, keepdims=True) - part for part in inside]
    (r, v), (r_rest, v_rest) = _ratio(*inside), _ratio(*outside)
    difference, spread = r - r_rest, np.maximum(v, 0.0) + np.maximum(v_rest, 0.0)
    spread[spread <= 1e-18 * difference**2] = 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(difference == 0.0, 0.0, difference / np.sqrt(spread)), dtype=np.float64)


def _ratio(s: Float, m: Float, ss: Float, sm: Float, mm: Float) -> tuple[Float, Float]:
    r = s / m
    return r, (ss - 2.0 * r * sm + r * r * mm) / m**2
