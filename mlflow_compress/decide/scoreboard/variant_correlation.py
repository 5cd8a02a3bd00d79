"""Rank correlations between metrics over variants: do flips, KL and grades order the variants alike?"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlflow_compress.decide.scoreboard.score_columns import MAIN_METRICS, Cell
from mlflow_compress.metrics.stats.correlation import MOST_FOR_EXACT, spearman, spearman_exact_p

FEWEST = 4


@dataclass(frozen=True, kw_only=True)
class VariantCorrelation:
    """Spearman's rank correlation of two metrics over the variants that have both.

    Attributes
    ----------
    first, second : str
        The metrics.
    value : float or None
        In [-1, 1]; None where there is none, for the `reason`.
    low, high : float or None
        The 95 % interval of Bonett and Wright; None for fewer than five variants, and for a correlation of 1 or -1.
    p : float or None
        Two-sided p-value of no correlation: over all orders for up to eight variants, Student's approximation for more.
        It is not corrected for the number of correlations.
    n : int
        Variants that have both.
    reason : str
        Why there is no correlation.
    """

    first: str
    second: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    n: int
    reason: str = ""


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
