"""Correlation with an interval: flips against KL over variants, similarity against ROUGE-L over instructions."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.stats.arrays import Float, finite, same_length
from mlflow_compress.metrics.stats.bootstrap import BootstrapMethod, bootstrap
from mlflow_compress.metrics.stats.intervals import Interval, z_value

_FEWEST = 3
_FEWEST_FOR_INTERVAL = 5

MOST_FOR_EXACT = 8
"""Most points whose orders are all tried: 40,320."""


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """A correlation with its interval, p-value and number of points."""

    value: float  # In [-1, 1]
    interval: Interval | None  # None for fewer than five points, and where none was asked for
    p_value: float  # Two-sided, of no correlation
    n: int  # Points, for instance (model, method) pairs


def _constant(x: Float) -> bool:
    # Values that should be equal may differ by rounding, whose correlation would be nonsense.
    return bool(np.ptp(x) <= 1e-12 * max(1.0, float(np.abs(x).max())))


def _pairs(x: npt.ArrayLike, y: npt.ArrayLike) -> tuple[Float, Float, bool]:
    """Return both arrays and whether a correlation of them exists."""
    a, b = finite("x", x), finite("y", y)
    n = same_length(x=a, y=b)
    return a, b, n >= _FEWEST and not _constant(a) and not _constant(b)


def _clean(value: float) -> float:
    # A perfect correlation, but for rounding.
    return math.copysign(1.0, value) if abs(value) > 1.0 - 1e-12 else value


def spearman(x: npt.ArrayLike, y: npt.ArrayLike, *, level: float = 0.95) -> Correlation | None:
    """Spearman's rank correlation of paired values, with the interval of Bonett and Wright; ties share their mean rank.

    ``tanh(atanh(rho) ± z sqrt((1 + rho²/2)/(n - 3)))``; at rho = ±1 the interval is that point. None for fewer than
    three points or values that do not vary: no correlation exists.

    Source: Bonett and Wright, "Sample size requirements for estimating Pearson, Kendall and Spearman correlations",
    Psychometrika 2000.
    """
    a, b, exists = _pairs(x, y)
    if not exists:
        return None
    from scipy.stats import spearmanr  # 0.5 s, which a command that finds everything done does not wait for

    n, test = len(a), spearmanr(a, b)
    rho = _clean(float(test.statistic))
    interval = None
    if n >= _FEWEST_FOR_INTERVAL:
        if abs(rho) == 1.0:
            interval = Interval(rho, rho)
        else:
            half = z_value(level) * math.sqrt((1 + rho * rho / 2) / (n - 3))
            interval = Interval(math.tanh(math.atanh(rho) - half), math.tanh(math.atanh(rho) + half))
    return Correlation(value=rho, interval=interval, p_value=float(test.pvalue), n=n)


def spearman_exact_p(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Return the two-sided p-value of Spearman's correlation over all orders of `y`, for up to eight points.

    It is the share of orders whose correlation is at least as far from 0. `spearman` has an approximation that is 0 for
    a perfect correlation, however few the points. More points, or none that vary, are a `DataError`.
    """
    a, b, exists = _pairs(x, y)
    if not exists or len(a) > MOST_FOR_EXACT:
        raise DataError("No exact p-value of this correlation", allowed=f"3 to {MOST_FOR_EXACT} points that vary")
    from scipy.stats import rankdata

    u, v = rankdata(a), rankdata(b)
    orders = v[np.array(list(itertools.permutations(range(len(v)))))]
    products = np.abs((orders - v.mean()) @ (u - u.mean()))
    observed = abs(float((v - v.mean()) @ (u - u.mean())))
    return float((products >= observed - 1e-9).mean())


def _from_moments(means: Float) -> Float:
    x, y, xx, yy, xy = (means[..., column] for column in range(5))
    with np.errstate(divide="ignore", invalid="ignore"):
        r = (xy - x * y) / np.sqrt(np.maximum(xx - x * x, 0.0) * np.maximum(yy - y * y, 0.0))
    return np.asarray(np.clip(r, -1.0, 1.0), dtype=np.float64)


def pearson(
    x: npt.ArrayLike,
    y: npt.ArrayLike,
    *,
    interval: bool = True,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    method: BootstrapMethod = "bca",
) -> Correlation | None:
    """Pearson's correlation ``cov(x, y)/(s_x s_y)`` of paired values with a bootstrap interval over the points.

    Without `interval` the points are not independent. None for fewer than three points or values that do not vary.
    """
    a, b, exists = _pairs(x, y)
    if not exists:
        return None
    from scipy.stats import pearsonr

    test, bounds = pearsonr(a, b), None
    if interval and len(a) >= _FEWEST_FOR_INTERVAL:
        # Standardised, so that the moments lose no digits.
        u, v = (a - a.mean()) / a.std(), (b - b.mean()) / b.std()
        moments = np.column_stack([u, v, u * u, v * v, u * v])
        bounds = bootstrap(moments, _from_moments, resamples=resamples, level=level, seed=seed, method=method)
    return Correlation(value=_clean(float(test.statistic)), interval=bounds, p_value=float(test.pvalue), n=len(a))
