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
_BOLDEST = 0.97  # the same of a bold one
_BOLD_SHARE = 0.8  # of the capital at the start
_PSEUDO_ITEMS = 20.0  # that a bold bettor believes to have seen

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


def _bold_bets(x: Float, m: float, side: Side) -> Float:
    """Return approximate Kelly bets ``|mean - m|/E(x - m)²`` from the items before, shape (n,).

    Before any item they believe in a mean of half, or twice, `m`. Where nothing speaks against it they risk almost
    everything, which shows a rare event to be rare with few items.
    """
    guess = m / 2.0 if side == "below" else min(2.0 * m, (1.0 + m) / 2.0)
    n = _PSEUDO_ITEMS + np.arange(len(x))
    mean = (_PSEUDO_ITEMS * guess + np.concatenate([[0.0], np.cumsum(x)[:-1]])) / n
    square = (_PSEUDO_ITEMS * guess + np.concatenate([[0.0], np.cumsum(x * x)[:-1]])) / n
    spread = np.maximum(square - 2.0 * m * mean + m * m, 1e-12)
    edge = m - mean if side == "below" else mean - m
    return np.asarray(np.maximum(edge, 0.0) / spread, dtype=np.float64)


def log_wealth(x: Float, m: float, *, side: Side, alpha: float) -> Float:
    """Return the log-capital after each item of who bets that the mean is below, or above, `m`; shape (n,).

    Four fifths of the capital are bet boldly, the rest carefully: the sum of two martingales is one.

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
    sign = 1.0 if side == "below" else -1.0
    room = 1.0 - m if side == "below" else m  # a bet of 1/room loses everything at the worst value
    paths = []
    for bets, most in ((_bold_bets(x, m, side), _BOLDEST), (careful_bets(x, math.log(1.0 / alpha)), MOST)):
        paths.append(np.cumsum(np.log1p(sign * np.minimum(bets, most / room) * (m - x))))
    bold, careful = paths
    return np.asarray(np.logaddexp(math.log(_BOLD_SHARE) + bold, math.log1p(-_BOLD_SHARE) + careful), dtype=np.float64)
