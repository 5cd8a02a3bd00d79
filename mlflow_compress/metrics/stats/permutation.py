"""Permutation test of parts: whether the mean over a part of some items is larger than that over all others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mlflow_compress.metrics.stats.arrays import Float, Int, finite, same_length

PERMUTATIONS = 4999
ENOUGH = 20
"""A part's p-value is known well enough when as many permutations reach its statistic."""

_CELLS = 2_000_000  # permuted values that are held at once
_KEPT = 20_000_000  # those that are kept for the next distance: 40 MB


def larger_part_p(
    values: npt.ArrayLike,
    parts: npt.ArrayLike,
    groups: npt.ArrayLike | None = None,
    *,
    permutations: int = PERMUTATIONS,
    seed: int = 0,
) -> Float:
    """Return the one-sided p-value of every part 0, 1, ...: its mean is larger than that of the other items.

    A unit is what one group has in one part; a group in several parts makes their means more alike, so that the test
    errs towards no finding. Under the hypothesis that the parts are drawn from one population, every assignment of
    units to parts is equally likely. Compared are ``t = (r - r')/sqrt(v + v')``, with r the ratio of the units' sums to
    their sizes, ``r = sum(s)/sum(m)``, and ``v = sum((s - r m)²)/sum(m)²``, both of the part and of the rest: the test
    is exact under that hypothesis, and keeps its level in large samples where parts differ in spread alone.

    Permutations end when each part's statistic was reached `ENOUGH` times, the last time by permutation l: its p-value
    is then ``ENOUGH/l``, else (1 + times reached)/(1 + permutations).

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
    for chosen in _orders(len(s), permutations, seed):
        at_least = _statistics(s[chosen], None if alone else m[chosen], starts) >= limit
        counts = reached + np.cumsum(at_least, axis=0)
        now = (ended == 0) & (counts[-1] >= ENOUGH)
        ended[now] = done + 1 + np.argmax(counts[:, now] >= ENOUGH, axis=0)
        reached, done = counts[-1], done + len(chosen)
        if (ended > 0).all():
            break
    return np.where(ended > 0, ENOUGH / np.maximum(ended, 1), (1 + reached) / (1 + done))


def _orders(n: int, permutations: int, seed: int) -> Iterator[Int]:
    """Iterate over random orders of n units in blocks of growing size, of shape (size, n)."""
    done, block = 0, 100
    while done < permutations:
        rows = max(1, min(block, permutations - done, _CELLS // n))
        yield _drawn(n, rows, done, seed) if permutations * n <= _KEPT else _drawn.__wrapped__(n, rows, done, seed)
        done, block = done + rows, 2 * block


@lru_cache(maxsize=32)
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
