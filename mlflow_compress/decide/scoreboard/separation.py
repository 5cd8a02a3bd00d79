"""Which variants can be told apart, by the KL and by the correctness of their answers to the same items."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.stats import ttest_1samp

from mlflow_compress.decide.scoreboard.scored_variant import MAIN_METRICS, Cell, ItemScores, ScoredVariant
from mlflow_compress.metrics.stats.arrays import finite
from mlflow_compress.metrics.stats.correlation import MOST_FOR_EXACT, spearman, spearman_exact_p
from mlflow_compress.metrics.stats.intervals import Interval, paired_difference
from mlflow_compress.metrics.stats.significance import holm, mcnemar_exact


@dataclass(frozen=True, kw_only=True)
class PairedMean:
    """A mean of paired differences."""

    value: float  # The mean
    interval: Interval  # It excludes 0 exactly where the p-value is below 1 minus the level
    p_value: float  # Two-sided, of a mean of 0
    n: int  # Number of pairs


def paired_mean(differences: npt.ArrayLike, *, level: float = 0.95) -> PairedMean | None:
    """Return the mean of paired differences with Student's interval and p-value, by scipy.

    - `differences` (n,): One difference per pair, such as the KL of two variants on one item.

    None for fewer than two pairs. Where all differences are 0 the interval is that point and p is 1. Where they are all
    the same and not 0 nothing is known of their spread: None.

    Notes
    -----
    The KL per item is skewed. The difference of two of them is less so, because both have the long tail. On real values
    of 200 items and more, 5 % of equal variants are told apart, and the interval misses in 5 to 6 %
    (`tests/unit/test_scoreboard_separation.py`).

    References
    ----------
    Student, "The probable error of a mean", Biometrika 1908.
    """
    d = finite("paired differences", differences)
    n = len(d)
    if n < 2:
        return None
    if (d == d[0]).all():
        return PairedMean(value=0.0, interval=Interval(0.0, 0.0), p_value=1.0, n=n) if d[0] == 0 else None
    found = ttest_1samp(d, 0.0)
    low, high = found.confidence_interval(confidence_level=level)
    return PairedMean(
        value=float(np.mean(d)), interval=Interval(float(low), float(high)), p_value=float(found.pvalue), n=n
    )


SIGNIFICANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A paired difference of two variants, the second minus the first."""

    value: float  # Mean difference per item and its interval, which is not corrected
    low: float
    high: float
    n: int  # Items that both have
    p: float  # p-value of no difference: of Student's paired test (KL), or McNemar's exact test (correctness)
    p_holm: float  # The same after Holm's correction over both tests of all pairs of the scoreboard

    @property
    def significant(self) -> bool:
        """Whether the corrected p-value is below 0.05."""
        return self.p_holm < SIGNIFICANCE


@dataclass(frozen=True, kw_only=True)
class Separation:
    """Whether two variants can be told apart."""

    first: str  # Their names
    second: str
    kl: Difference | None  # Difference of the KL per item, in nats; None where fewer than two items have one
    correctness: Difference | None  # Difference of the share of right answers; None where no item was answered by both

    @property
    def told_apart(self) -> bool:
        """Whether KL or correctness differs significantly."""
        return any(found is not None and found.significant for found in (self.kl, self.correctness))


def _kl(first: ItemScores, second: ItemScores, level: float) -> Difference | None:
    difference = second.kl - first.kl
    difference = difference[np.isfinite(difference)]
    found = paired_mean(difference, level=level) if len(difference) else None
    if found is None:
        return None
    low, high = found.interval
    return Difference(value=found.value, low=low, high=high, n=found.n, p=found.p_value, p_holm=found.p_value)


def _correctness(first: ItemScores, second: ItemScores, level: float) -> Difference | None:
    both = np.isfinite(first.correct) & np.isfinite(second.correct)
    n = int(both.sum())
    if n == 0:
        return None
    right, other = first.correct[both] == 1, second.correct[both] == 1
    gained, lost = int((~right & other).sum()), int((right & ~other).sum())
    low, high = paired_difference(gained, lost, n, level=level)
    p = mcnemar_exact(lost, gained)
    return Difference(value=(gained - lost) / n, low=low, high=high, n=n, p=p, p_holm=p)


def separate(variants: Sequence[ScoredVariant], *, level: float = 0.95) -> tuple[Separation, ...]:
    """Return every pair of the variants that have items, with Holm's correction over both tests of all pairs.

    Raises `AlignmentError`: two variants were not evaluated on the same items.
    """
    named = [(variant.name, variant.items) for variant in variants if variant.items is not None]
    aligned = [(name, items.in_order_of(named[0][1])) for name, items in named]
    raw = [
        Separation(first=a, second=b, kl=_kl(x, y, level), correctness=_correctness(x, y, level))
        for (a, x), (b, y) in itertools.combinations(aligned, 2)
    ]
    tests = [test for pair in raw for test in (pair.kl, pair.correctness) if test is not None]
    if not tests:
        return tuple(raw)
    corrected = iter(holm([test.p for test in tests]).tolist())

    def with_correction(test: Difference | None) -> Difference | None:
        return None if test is None else replace(test, p_holm=next(corrected))

    return tuple(
        replace(pair, kl=with_correction(pair.kl), correctness=with_correction(pair.correctness)) for pair in raw
    )


def groups_not_told_apart(order: Sequence[str], apart: Collection[frozenset[str]]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of a critical-difference view: neighbours in `order` of which no two are told apart.

    - `order`: The variants, sorted by the value that is compared.

    Groups of two and more that are part of no larger one, in the order of their first members.

    Examples
    --------
    >>> groups_not_told_apart(["a", "b", "c"], {frozenset("ac")})
    (('a', 'b'), ('b', 'c'))
    """
    groups: list[tuple[str, ...]] = []
    last = 0
    for start in range(len(order)):
        end = start + 1
        while end < len(order) and not any(frozenset((order[i], order[end])) in apart for i in range(start, end)):
            end += 1
        if end > last and end - start > 1:
            groups.append(tuple(order[start:end]))
        last = max(last, end)
    return tuple(groups)


FEWEST = 4


@dataclass(frozen=True, kw_only=True)
class VariantCorrelation:
    """Spearman's rank correlation of two metrics over the variants that have both."""

    first: str  # The metrics
    second: str
    value: float | None = None  # In [-1, 1]; None where there is none, for the `reason`
    # The 95 % interval of Bonett and Wright; None for fewer than five variants, and for a correlation of 1 or -1
    low: float | None = None
    high: float | None = None
    # Two-sided p-value of no correlation: over all orders for up to eight variants, Student's approximation for more.
    # It is not corrected for the number of correlations.
    p: float | None = None
    n: int  # Variants that have both
    reason: str = ""  # Why there is no correlation


def correlate_metrics(rows: Sequence[Mapping[str, Cell]]) -> tuple[VariantCorrelation, ...]:
    """Return the correlation of every pair of main metrics that at least one variant has."""
    metrics = [name for name in MAIN_METRICS if any(name in row for row in rows)]
    return tuple(_correlation(rows, a, b) for a, b in itertools.combinations(metrics, 2))


def _correlation(rows: Sequence[Mapping[str, Cell]], first: str, second: str) -> VariantCorrelation:
    pairs = [(row[first].value, row[second].value) for row in rows if first in row and second in row]
    n = len(pairs)
    if n < FEWEST:
        reason = f"{n} {'variant has' if n == 1 else 'variants have'} both, at least {FEWEST} are needed"
        return VariantCorrelation(first=first, second=second, n=n, reason=reason)
    x, y = zip(*pairs, strict=True)
    found = spearman(x, y)
    if found is None:
        return VariantCorrelation(first=first, second=second, n=n, reason="one of them is the same for all variants")
    perfect = abs(found.value) == 1.0  # the formula's interval is then a point, however few the variants
    low, high = (None, None) if found.interval is None or perfect else found.interval
    p = spearman_exact_p(x, y) if n <= MOST_FOR_EXACT else found.p_value
    return VariantCorrelation(first=first, second=second, value=found.value, low=low, high=high, p=p, n=n)
