"""Score intervals for proportions: Wilson for one sample, Tango for the difference of two paired ones."""

from __future__ import annotations

import math
from typing import NamedTuple

from scipy.optimize import brentq
from scipy.stats import binomtest, norm

from mlflow_compress.errors import ConfigError, DataError


class Interval(NamedTuple):
    """Lower and upper bound."""

    low: float
    high: float


def z_value(level: float) -> float:
    """Return the two-sided standard normal quantile of a confidence level, 1.96 for 0.95."""
    if not 0.0 < level < 1.0:
        raise ConfigError("The confidence level must lie strictly between 0 and 1", got=level)
    return float(norm.ppf(0.5 + level / 2.0))


def wilson(successes: int, n: int, *, level: float = 0.95) -> Interval:
    """Wilson score interval of a proportion, by scipy.

    ``(p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)`` with ``p = successes/n``; never empty at p = 0 or 1.

    References
    ----------
    Wilson, "Probable inference, the law of succession, and statistical inference", JASA 1927.

    Examples
    --------
    >>> [round(x, 4) for x in wilson(8, 10)]
    [0.4902, 0.9433]
    """
    if n < 1 or not 0 <= successes <= n:
        raise DataError("A proportion needs 0 <= successes <= n and n >= 1", got=f"{successes} of {n}")
    if not 0.0 < level < 1.0:
        raise ConfigError("The confidence level must lie strictly between 0 and 1", got=level)
    found = binomtest(successes, n).proportion_ci(confidence_level=level, method="wilson")
    return Interval(float(found.low), float(found.high))


def paired_difference(gained: int, lost: int, n: int, *, level: float = 0.95) -> Interval:
    """Tango's score interval of ``(gained - lost)/n``, the difference of two paired proportions.

    The set of `d` with ``|gained - lost - n d| <= z sqrt(n (2 q(d) + d (1 - d)))``, where `q(d)` is the
    maximum-likelihood estimate of the lost share given `d`. Unlike the bootstrap it does not
    collapse to a point when nothing changed.

    Parameters
    ----------
    gained, lost : int
        Items that only the second model, or only the first, has right.
    n : int
        All pairs.

    References
    ----------
    Tango, "Equivalence test and confidence interval for the difference in proportions for the paired-sample
    design", Statistics in Medicine 1998.
    """
    if n < 1 or min(gained, lost) < 0 or gained + lost > n:
        raise DataError("Paired counts need gained, lost >= 0 and gained + lost <= n", got=f"{gained}, {lost}, {n}")
    z = z_value(level)

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
