"""What one end of a 95 % interval says at other levels: the p-value of a limit, and an end that holds for several."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.stats import norm

from mlflow_compress.metrics.stats.intervals import z_value

ERROR = 0.025
"""Probability that the truth lies beyond one end of a 95 % interval."""


@dataclass(frozen=True, kw_only=True)
class OneEnd:
    """A value, one end of its 95 % interval, and the range that the value can have at all.

    With a finite range the error is that of a share, whose variance is that at the limit: with all values mapped to
    ``[0, 1]``, ``z(x)^2 = (x - v)^2/(c x (1 - x))``, and c is such that ``z(end) = 1.96``. For Wilson's interval this
    is exact, with a design effect too. A mean without an upper limit, such as a KL, has an error on the scale of its
    logarithm, ``z(x) = 1.96 log(x/v)/log(end/v)``; a mean that may have either sign a plain one.

    Source: Wilson, JASA 1927 (the score interval solved for z instead of for the limit).
    """

    value: float
    end: float
    low: float
    high: float

    def p_value(self, limit: float) -> float:
        """Return the probability of a value this far on the good side of `limit`, if the truth were at the limit.

        It is at most 0.025 exactly where the end keeps to the limit. On the wrong side of the value it is 1.
        """
        below = self.end >= self.value  # an upper end: the truth is to lie below the limit
        if (limit <= self.value) if below else (limit >= self.value):
            return 1.0 if self.end != self.value or limit != self.value else 0.0
        return float(norm.sf(self._z(limit)))

    def _z(self, limit: float) -> float:
        if self.end == self.value or not self.low < limit < self.high:
            return math.inf
        if math.isfinite(self.low + self.high):
            x, v, u = self._share(limit), self._share(self.value), self._share(self.end)
            if not 0.0 < u < 1.0:
                return 0.0
            return z_value(0.95) * abs(x - v) / abs(u - v) * math.sqrt(u * (1 - u) / (x * (1 - x)))
        if self.low == 0.0 < self.value:
            return z_value(0.95) * math.log(limit / self.value) / math.log(self.end / self.value)
        return z_value(0.95) * (limit - self.value) / (self.end - self.value)

    def for_all(self, n: int) -> float:
        """Return the end that holds for n values at once with 97.5 %, whichever of them is chosen (Bonferroni)."""
        if self.end == self.value:
            return self.end
        k = (float(norm.isf(ERROR / n)) / z_value(0.95)) ** 2
        if math.isfinite(self.low + self.high):
            v, u = self._share(self.value), self._share(self.end)
            if not 0.0 < u < 1.0:
                return self.end
            k *= (u - v) ** 2 / (u * (1 - u))
            # The solution of (x - v)^2 = k x (1 - x) on the end's side of the value.
            middle, root = 2 * v + k, math.sqrt(max((2 * v + k) ** 2 - 4 * (1 + k) * v * v, 0.0))
            share = (middle + math.copysign(root, u - v)) / (2 * (1 + k))
            return self.low + share * (self.high - self.low)
        if self.low == 0.0 < self.value:
            return float(self.value * (self.end / self.value) ** math.sqrt(k))
        return self.value + (self.end - self.value) * math.sqrt(k)

    def _share(self, x: float) -> float:
        return (x - self.low) / (self.high - self.low)
