"""How many items settle what a sample leaves open: averaged over what it leaves open, not planned from its value alone.

A variant whose interval reaches beyond a limit may lie on either side of it. Items that are planned as if its value
were the truth settle too little: 43 to 64 % of samples in place of 80 %. So the truth is drawn from what the first
items say of it (the posterior of a uniform prior, normal for means), and N is such that 80 % of fresh samples of N
items pass: an assurance (O'Hagan, Stevens and Campbell, "Assurance in clinical trial design", Pharmaceutical Statistics
2005). `benchmarks/items_to_settle.py` simulates it.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy import special

from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.metrics.stats.intervals import z_value

_POWER, _SURE = 0.8, 0.975
MOST_TIMES = 10.0
"""More than so many times the items are not told: the first ones are too few to plan from."""

_LEVELS = (np.arange(32) + 0.5) / 32  # of a posterior's quantiles, for means over it
_SIDES: Float = np.linspace(
    -1.0, 1.0, 81, dtype=np.float64
)  # changes of accuracy, as parts of the share of items that changed
_STEPS = 40  # bisections


def fewest_without_event(limit: float) -> float:
    """Return the smallest n whose 95 % Wilson interval of 0 events ends at `limit` or below; infinite for a limit of 0.

    The upper end is ``z^2 / (n + z^2)``, so that ``n >= z^2 (1 - limit) / limit``.
    """
    if limit <= 0:
        return math.inf
    return max(1, math.ceil(z_value(0.95) ** 2 * (1 - limit) / limit - 1e-9))


def items_to_settle(discordant: float, n: float, margin: float) -> float:
    """Return the items of which 80 % of samples show harm, or that it is below a margin, whatever the true change is.

    With a share D of items that only one model has right, an item's difference has the variance ``D - d^2`` at a change
    d, and ``max(D, |d0|) - d0^2`` at a change d0 that is to be excluded, as D is nowhere below the change. So N items
    exclude d0 with the probability

    ``P(d0) = Phi((|d - d0| sqrt(N) - z_0.975 sqrt(max(D, |d0|) - d0^2)) / sqrt(D - d^2))``

    where d is on the right side. Both claims may be true: N solves ``P(0) + P(-margin) = 0.8`` at the change that needs
    most, and at the upper end of D's one-sided 80 % interval. An average over the changes that the first items leave
    open would be smaller, as few items settle those beyond the two limits, and so settle 31 to 61 % of those between.

    A sample that is open with more items than N was near a limit by bad luck: N is then for `_SURE` in place of 80 %.

    - `discordant`: D in `n` items, a share, like `margin`, which is above 0.
    """
    d = float(special.betaincinv(discordant * n + 1, n - discordant * n + 1, _POWER))
    change = d * _SIDES

    def settled(items: float) -> float:
        claims = (
            _excluded(sign * (change - at), items, max(d, abs(at)) - at**2, d - change**2)
            for at, sign in ((0.0, -1.0), (-margin, 1.0))
        )
        return float(sum(claims, np.zeros(1)).min())

    most = n
    while settled(most) < _SURE:
        most *= 2
    likely = _smallest(settled, 1.0, most)
    return likely if likely > n else _smallest(settled, n, most, power=_SURE)


def times_for_share(share: float, n: float, limit: float) -> float:
    """Return how many times `n` items show that a share is at most `limit`, with 80 %; infinite above `MOST_TIMES`."""
    p = _posterior(share * n, n)
    return _times(lambda t: _excluded(limit - p, t * n, limit * (1 - limit), p * (1 - p)))


def times_for_change(change: float, discordant: float, n: float, excluded: float) -> float:
    """Return how many times `n` items show that a change of accuracy is above `excluded`, as `times_for_share` does.

    All are shares; `discordant` is that of items that only one model has right.
    """
    d = _posterior(discordant * n, n)[:, None]
    d0 = np.maximum(d, abs(excluded)) - excluded**2
    gained = special.betaincinv((discordant + change) / 2 * n + 1, (discordant - change) / 2 * n + 1, _LEVELS)
    true = d * (2 * gained[None] - 1)
    return _times(lambda t: _excluded(true - excluded, t * n, d0, d - true**2))


def times_for_mean(distance: float, half_width: float) -> float:
    """Return how many times the items bring the end of a 95 % interval within a limit, as `times_for_share` does.

    The end is now `half_width` from the mean, and the limit `distance`, on the same side.
    """
    z = z_value(0.95)
    off = -special.ndtri(_LEVELS)  # of the true mean, in standard errors of the first items
    return _times(lambda t: _excluded(distance / half_width * z + off, t, 1.0, 1.0))


def _posterior(count: float, n: float) -> Float:
    """Return quantiles of what `count` of `n` items say of a share: the posterior of a uniform prior."""
    return np.asarray(special.betaincinv(count + 1, n - count + 1, _LEVELS), dtype=np.float64)


def _excluded(gap: Float, n: float, at_limit: npt.ArrayLike, variance: npt.ArrayLike) -> Float:
    """Return the probability that n items exclude a limit by its score interval, where the truth is `gap` inside.

    An item's value has the variance `at_limit` at the limit, and `variance` at the truth.
    """
    ends = gap * math.sqrt(n) - z_value(0.95) * np.sqrt(at_limit)
    return np.asarray(special.ndtr(ends / np.sqrt(np.maximum(variance, 1e-18))), dtype=np.float64)


def _times(passes: Callable[[float], Float]) -> float:
    def assured(t: float) -> float:
        return float(passes(t).mean())

    return math.inf if assured(MOST_TIMES) < _POWER else _smallest(assured, 1.0, MOST_TIMES)


def _smallest(assured: Callable[[float], float], low: float, high: float, *, power: float = _POWER) -> float:
    """Return where `assured` reaches `power`, between `low` and `high`, at which it does."""
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if assured(middle) >= power else (middle, high)
    return high


def round_up(n: float) -> int:
    """Return a number of items rounded up to two digits."""
    unit = 10 ** max(math.floor(math.log10(n)) - 1, 0) if n >= 1 else 1
    return math.ceil(n / unit) * unit
