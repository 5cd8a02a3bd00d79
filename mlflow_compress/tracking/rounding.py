"""Rounds a logged value to the digits that its interval supports."""

from __future__ import annotations

import math

from mlflow_compress.records import MetricResult


def rounded(result: MetricResult) -> float:
    """Return the value with two digits of its interval's half-width, or six significant digits where it has none.

    The run's `metrics.json` has the exact values. Tables should not show digits that the data do not support.
    """
    if result.value == 0:
        return 0.0
    if result.low is not None and result.high is not None and result.high > result.low:
        digits = 1 - math.floor(math.log10((result.high - result.low) / 2))
    else:
        digits = 5 - math.floor(math.log10(abs(result.value)))
    return round(result.value, digits)
