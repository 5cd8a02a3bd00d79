"""Sample sizes: the number of items that a study needs."""

from __future__ import annotations

import math

from scipy.stats import norm

from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics.stats.intervals import wilson, z_value


def _check(level: float, power: float) -> tuple[float, float]:
    if not 0.0 < power < 1.0:
        raise ConfigError("power must lie strictly between 0 and 1", got=power)
    return z_value(level), float(norm.ppf(power))


def items_for_width(share: float, half_width: float, *, level: float = 0.95) -> int:
    """Return the smallest n whose Wilson interval around a share is no wider than ``2 half_width``.

    Parameters
    ----------
    share : float
        Expected share in [0, 1]: flips, accuracy.
    half_width : float
        Wanted half width in (0, 0.5).

    Examples
    --------
    >>> items_for_width(0.5, 0.05)
    381
    """
    if not 0.0 <= share <= 1.0:
        raise ConfigError("share must lie in [0, 1]", got=share)
    if not 0.0 < half_width < 0.5:
        raise ConfigError("half_width must lie strictly between 0 and 0.5", got=half_width)
    z2 = z_value(level) ** 2

    def half(n: int) -> float:
        return math.sqrt(z2) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)

    low, high = 0, 1
    while half(high) > half_width:
        low, high = high, 2 * high
    while high - low > 1:  # the width falls with n
        middle = (low + high) // 2
        low, high = (middle, high) if half(middle) > half_width else (low, middle)
    return high


def items_for_accuracy_change(delta: float, discordant: float, *, level: float = 0.95, power: float = 0.8) -> int:
    """Return the pairs that McNemar's test needs to find an accuracy change.

    ``n = (z_a sqrt(psi) + z_b sqrt(psi - delta²))² / delta²``.

    Parameters
    ----------
    delta : float
        Change of accuracy to be found, not 0.
    discordant : float
        ``psi``, expected share of flips, at least ``|delta|``: the more answers flip, the more items a change needs.
    level, power : float
        Two-sided confidence level and power.

    References
    ----------
    Connor, "Sample size for testing differences in proportions for the paired-sample design", Biometrics 1987.
    """
    z_a, z_b = _check(level, power)
    if delta == 0.0 or not abs(delta) <= discordant <= 1.0:
        raise ConfigError(
            "discordant must lie between |delta| > 0 and 1", got=f"delta {delta}, discordant {discordant}"
        )
    root = z_a * math.sqrt(discordant) + z_b * math.sqrt(discordant - delta * delta)
    return math.ceil(root * root / (delta * delta))


def items_for_mean(difference: float, std: float, *, level: float = 0.95, power: float = 0.8) -> int:
    """Return the items that a paired test of a mean difference needs: ``n = ((z_a + z_b) std / difference)²``."""
    z_a, z_b = _check(level, power)
    if difference == 0.0 or std <= 0.0:
        raise ConfigError("difference must not be 0 and std must be positive", got=f"{difference}, {std}")
    return math.ceil(((z_a + z_b) * std / difference) ** 2)


def items_for_flips_gate(flips: float, limit: float, *, level: float = 0.95, power: float = 0.8) -> int:
    """Return the items after which a gate "upper end of the flips interval <= limit" passes with the wanted power.

    Uses the normal approximation of the count and the Wilson interval that the gate itself uses.

    Parameters
    ----------
    flips, limit : float
        True share of flips and the gate's limit, ``0 <= flips < limit < 1``.
    """
    _, z_b = _check(level, power)
    if not 0.0 <= flips < limit < 1.0:
        raise ConfigError("Need 0 <= flips < limit < 1", got=f"{flips}, {limit}")

    def passes(n: int) -> bool:
        likely = flips + z_b * math.sqrt(flips * (1 - flips) / n)
        return wilson(min(n, math.ceil(likely * n)), n, level=level).high <= limit

    # Rounding to whole items makes `passes` flicker near the answer, so walk up in steps of one percent.
    n = 4
    while not passes(n):
        n = max(n + 1, int(n * 1.01))
    return n
