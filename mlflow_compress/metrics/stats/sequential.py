"""Anytime-valid confidence sequences by betting. They may be checked after every item, and stopped early.

A bettor who does not believe that the mean is `m` bets against it; the capital is a martingale if the mean IS `m`, so
that it ever reaches 1/alpha with probability at most alpha (Ville). This holds for items in random order only (a file
sorted by category passes or fails by its first category), so the order is drawn here, from the items' ids and a seed.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics.stats.arrays import Float, Int, finite, same_length
from mlflow_compress.metrics.stats.early.betting import MOST, careful_bets, log_wealth

_BLOCK = 2_000_000  # bets held at once

Verdict = Literal["pass", "fail", "undecided"]


def _unit(values: npt.ArrayLike, upper: float) -> Float:
    if not upper > 0.0 or not math.isfinite(upper):
        raise ConfigError("The upper bound must be positive and finite", got=upper)
    x = finite("values", values)
    if x.min() < 0.0 or x.max() > upper:
        raise DataError(
            f"Values must lie in [0, {upper}]",
            got=f"{x.min()} to {x.max()}",
            fix="Clip them and say so, or raise upper",
        )
    return x / upper


def random_order(ids: Iterable[object], *, seed: int = 0) -> Int:
    """Return the random order in which items are looked at: the rows, sorted by the SHA-256 of seed and id.

    It depends on the ids and the seed alone, not on the order in which the items are given: whoever repeats a decision
    with the same items looks at them in the same order, and nobody can choose an order by sorting a file.

    Parameters
    ----------
    ids : iterable of str or int, or of tuples of these such as (task, item_id)
        One per item, all different.
    seed : int
        Another seed draws another order.

    Raises
    ------
    DataError
        When there is no id, or two items share one.
    """
    names = [repr(tuple(map(str, i)) if isinstance(i, tuple) else str(i)) for i in ids]
    if not names:
        raise DataError("An order needs at least one item", fix="Give one id per item")
    if len(set(names)) != len(names):
        repeated = Counter(names).most_common(1)[0][0]
        raise DataError("Two items share an id", got=repeated, fix="Give every item an id of its own")
    keys = [hashlib.sha256(f"{seed}\x1f{name}".encode()).digest() for name in names]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)


def _in_random_order(values: npt.ArrayLike, ids: Iterable[object], *, upper: float, seed: int) -> Float:
    """Return the values as shares of `upper`, in the random order of their ids."""
    x, given = _unit(values, upper), list(ids)
    same_length(values=x, ids=given)
    return x[random_order(given, seed=seed)]


def _check_alpha(alpha: float) -> None:
    if not 0.0 < alpha < 1.0:
        raise ConfigError("alpha must lie strictly between 0 and 1", got=alpha)


@dataclass(frozen=True, kw_only=True)
class ConfidenceSequence:
    """Bounds after each item; all of them hold together with probability at least ``1 - alpha``.

    Attributes
    ----------
    low, high : numpy.ndarray, shape (n,)
        Running intersection, so the interval never widens.
    """

    low: Float
    high: Float


def confidence_sequence(
    values: npt.ArrayLike,
    ids: Iterable[object],
    *,
    seed: int = 0,
    upper: float = 1.0,
    alpha: float = 0.05,
    grid: int = 1000,
) -> ConfidenceSequence:
    """Hedged-capital confidence sequence for the mean of bounded values.

    ``K_t(m) = max(prod(1 + b_i (x_i - m)), prod(1 - b_i (x_i - m)))/2`` with bets from the past only; `m` is left out
    as soon as ``K_t(m) >= 1/alpha``.

    Parameters
    ----------
    values : array_like, shape (n,)
        Flips (0 or 1), or KL per item clipped at `upper` (the sequence is then about the clipped mean).
    ids : iterable, length n
        The items, all different; they and `seed` decide the order (see `random_order`). Bound `t` is about the first
        `t` items in that order.
    seed : int
        Of the order.
    upper : float
        Values lie in [0, upper].
    alpha : float
        Error level over all looks together.
    grid : int
        Number of intervals of candidate means; bounds are widened to the grid.

    References
    ----------
    Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS-B 2024, theorem 3.
    """
    _check_alpha(alpha)
    if grid < 10:
        raise ConfigError("grid must be at least 10", got=grid)
    x = _in_random_order(values, ids, upper=upper, seed=seed)
    m = np.linspace(0.0, 1.0, grid + 1)
    with np.errstate(divide="ignore"):
        caps = {1.0: MOST / m, -1.0: MOST / (1.0 - m)}
    bets = careful_bets(x, math.log(2.0 / alpha))
    limit = math.log(2.0 / alpha)
    capital = {sign: np.zeros(grid + 1) for sign in caps}
    alive = np.ones(grid + 1, dtype=bool)
    low, high = np.empty(len(x)), np.empty(len(x))
    step = max(1, _BLOCK // (grid + 1))
    for start in range(0, len(x), step):
        block = slice(start, start + step)
        kept = np.ones((len(x[block]), grid + 1), dtype=bool)
        for sign, cap in caps.items():
            size = np.minimum(bets[block, None], cap[None, :])
            growth = np.log1p(sign * size * (x[block, None] - m[None, :]))
            path = capital[sign] + np.cumsum(growth, axis=0)
            capital[sign] = path[-1]
            kept &= path < limit
        kept = np.logical_and.accumulate(kept, axis=0) & alive
        alive = kept[-1]
        # One step outwards: the true bound lies between two candidates.
        low[block] = np.maximum(kept.argmax(axis=1) - 1, 0) / grid
        high[block] = np.minimum(grid - kept[:, ::-1].argmax(axis=1) + 1, grid) / grid
        gone = ~kept.any(axis=1)
        if gone.any():  # every candidate is left out: a rare error of the sequence; the last interval stands
            first = start + int(np.argmax(gone))
            low[first:], high[first:] = low[first - 1], high[first - 1]
            break
    return ConfidenceSequence(low=low * upper, high=high * upper)


@dataclass(frozen=True, kw_only=True)
class GateDecision:
    """Where a sequential gate stopped.

    Attributes
    ----------
    verdict : {"pass", "fail", "undecided"}
        The mean is below the limit, above it, or neither could be shown.
    n_used : int
        Items looked at when the verdict fell; all of them where it is "undecided".
    """

    verdict: Verdict
    n_used: int


def sequential_gate(
    values: npt.ArrayLike,
    ids: Iterable[object],
    limit: float,
    *,
    seed: int = 0,
    upper: float = 1.0,
    alpha: float = 0.05,
) -> GateDecision:
    """Decide "mean below `limit`" as early as the data allow.

    The items are looked at in a random order of the gate's own, so that a file sorted by category, length or difficulty
    does no harm. To save the scoring of items, score them in `random_order` of all ids and ask the gate after each: the
    first items in that order keep their places, so that the answers agree. The first items of a sorted file are no
    sample of it.

    Both wrong verdicts, "pass" with a mean of `limit` or more and "fail" with one of `limit` or less, have probability
    at most `alpha` each, however often the gate looks. The page "Stop an evaluation early"
    has the simulated error rates and savings, which the tests repeat.

    Parameters
    ----------
    values : array_like, shape (n,)
        Within [0, upper]; a KL must be clipped, which bounds the clipped mean only.
    ids : iterable, length n
        The items, all different; they and `seed` decide the order, not the order in which they are given.
    limit : float
        The gate, strictly between 0 and `upper`.
    seed : int
        Of the order.
    upper, alpha
        As in `confidence_sequence`.

    Raises
    ------
    DataError
        For values outside [0, upper], ids that are repeated, or another number of ids than of values.
    """
    _check_alpha(alpha)
    x = _in_random_order(values, ids, upper=upper, seed=seed)
    m = limit / upper
    if not 0.0 < m < 1.0:
        raise ConfigError("The limit must lie strictly between 0 and the upper bound", got=limit)
    wealth = {
        "pass": log_wealth(x, m, side="below", alpha=alpha),
        "fail": log_wealth(x, m, side="above", alpha=alpha),
    }
    stops: list[tuple[int, Verdict]] = []
    verdicts: tuple[Verdict, ...] = ("pass", "fail")
    for verdict in verdicts:
        won = wealth[verdict] >= math.log(1.0 / alpha)
        if won.any():
            stops.append((int(np.argmax(won)) + 1, verdict))
    if not stops:
        return GateDecision(verdict="undecided", n_used=len(x))
    n_used, verdict = min(stops)
    return GateDecision(verdict=verdict, n_used=n_used)
