"""Which variants can be told apart, by the KL and by the correctness of their answers to the same items."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlflow_compress.decide.scoreboard.paired_mean import paired_mean
from mlflow_compress.decide.scoreboard.scored_variant import ItemScores, ScoredVariant
from mlflow_compress.metrics.stats.intervals import paired_difference
from mlflow_compress.metrics.stats.significance import holm, mcnemar_exact

SIGNIFICANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A paired difference of two variants, the second minus the first.

    Attributes
    ----------
    value, low, high : float
        Mean difference per item and its interval, which is not corrected.
    n : int
        Items that both have.
    p : float
        p-value of no difference: of Student's paired test (KL), or McNemar's exact test (correctness).
    p_holm : float
        The same after Holm's correction over both tests of all pairs of the scoreboard.
    """

    value: float
    low: float
    high: float
    n: int
    p: float
    p_holm: float

    @property
    def significant(self) -> bool:
        """Whether the corrected p-value is below 0.05."""
        return self.p_holm < SIGNIFICANCE


@dataclass(frozen=True, kw_only=True)
class Separation:
    """Whether two variants can be told apart.

    Attributes
    ----------
    first, second : str
        Their names.
    kl : Difference or None
        Difference of the KL per item, in nats; None where fewer than two items have one.
    correctness : Difference or None
        Difference of the share of right answers; None where no item was answered by both.
    """

    first: str
    second: str
    kl: Difference | None
    correctness: Difference | None

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

    Raises
    ------
    AlignmentError
        Two variants were not evaluated on the same items.
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

    Parameters
    ----------
    order : sequence of str
        The variants, sorted by the value that is compared.
    apart : collection of frozenset of str
        The pairs that are told apart.

    Returns
    -------
    tuple of tuple of str
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
