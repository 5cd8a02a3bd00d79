"""Bets against a claim about the mean of bounded values: what the sequential tests are made of.

Who bets against "the mean is m" with a share of his capital that depends on the past only multiplies it, item by item.
If the mean IS m, the capital is a martingale, and ever reaches 1/alpha with probability at most alpha (Ville).
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from mlflow_compress.metrics.stats.arrays import Float

MOST = 0.5  # share of the capital that a careful bet may lose
_BOLD_SHARE = 0.95  # of the capital at the start
_PSEUDO_ITEMS = 10.0  # that a bold bettor believes to have seen
_SHARES = np.concatenate([[0.0], np.geomspace(0.01, 0.5, 14), np.linspace(0.55, 0.99, 12)])
"""Shares of the capital that a bold bet may lose: nothing, or from 1 % to almost everything."""

Side = Literal["below", "above"]


def careful_bets(x: Float, log_odds: float) -> Float:
    """Return the predictable bet sizes ``sqrt(2 log_odds / (var_{t-1} t log(1 + t)))``, shape (n,).

    References
    ----------
    Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS-B 2024.
    """
    t = np.arange(1, len(x) + 1)
    mean = (0.5 + np.cumsum(x)) / (t + 1)
    variance = (0.25 + np.cumsum((x - mean) ** 2)) / (t + 1)
    before = np.concatenate([[0.25], variance[:-1]])
    return np.asarray(np.sqrt(2.0 * log_odds / (before * t * np.log1p(t))), dtype=np.float64)


def _bold_path(x: Float, m: float, side: Side) -> Float:
    """Return the log-capital of who stakes before each item what would have gained most until then, shape (n,).

    That is Kelly's bet for the items so far. Ten items with a mean of a tenth of `m` (or twice `m`, for "above") are
    believed in beforehand, so that rare events are shown to be rare with few items.
    """
    sign, room = _direction(m, side)
    bets = _SHARES / room
    guess = 0.1 * m if side == "below" else min(2.0 * m, (1.0 + m) / 2.0)
    believed = guess * np.log1p(sign * bets * (m - 1.0)) + (1.0 - guess) * np.log1p(sign * bets * m)
    gains = np.log1p(sign * bets[None, :] * (m - x[:, None]))
    before = np.cumsum(gains, axis=0) - gains + _PSEUDO_ITEMS * believed
    return np.asarray(np.cumsum(gains[np.arange(len(x)), before.argmax(axis=1)]), dtype=np.float64)


def _direction(m: float, side: Side) -> tuple[float, float]:
    """Return the sign of a bet, and what it has room for: a bet of 1/room loses everything at the worst value."""
    return (1.0, 1.0 - m) if side == "below" else (-1.0, m)


def log_wealth(x: Float, m: float, *, side: Side, alpha: float) -> Float:
    """Return the log-capital after each item of who bets that the mean is below, or above, `m`; shape (n,).

    Nearly all of the capital is bet boldly, the rest carefully: the sum of two martingales is one.

    Parameters
    ----------
    x : numpy.ndarray, shape (n,)
        Values in [0, 1], in random order.
    m : float
        Strictly between 0 and 1.
    side : {"below", "above"}
        The claim that gains from the bets.
    alpha : float
        Level that the careful bets aim at. The capital is a martingale whatever it is.
    """
    sign, room = _direction(m, side)
    bets = np.minimum(careful_bets(x, math.log(1.0 / alpha)), MOST / room)
    careful = np.cumsum(np.log1p(sign * bets * (m - x)))
    bold = _bold_path(x, m, side)
    return np.asarray(np.logaddexp(math.log(_BOLD_SHARE) + bold, math.log1p(-_BOLD_SHARE) + careful), dtype=np.float64)
