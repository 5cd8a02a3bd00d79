"""What is logged of a value: metrics as exact as their intervals, parameters with what "auto" stands for."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping

from mlflow_compress.records import MetricResult

RESOLVED = "resolved/"  # prefix for the final value of a parameter that was logged with another one, such as "auto"


def rounded(result: MetricResult) -> float:
    """Return the value with two digits of its interval's half-width, or six significant digits where it has none.

    A value whose interval excludes 0 keeps one digit of its own: 3 within [0.03, 391] is not 0. The run's
    `metrics.json` has the exact values. Tables should not show digits that the data do not support.
    """
    if result.value == 0:
        return 0.0
    if result.low is not None and result.high is not None and result.high > result.low:
        digits = 1 - math.floor(math.log10((result.high - result.low) / 2))
        if result.low > 0 or result.high < 0:
            digits = max(digits, -math.floor(math.log10(abs(result.value))))
    else:
        digits = 5 - math.floor(math.log10(abs(result.value)))
    return round(result.value, digits)


def new_parameters(there: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters to log so that a run shows `values`: new names, and resolved values under `RESOLVED`."""
    new: dict[str, str] = {}
    for name, value in values.items():
        if name not in there:
            new[name] = value
        elif _unquoted(there[name]) != value and RESOLVED + name not in there:
            new[RESOLVED + name] = value
    return new


def _unquoted(text: str) -> str:
    """Return a parameter as the user gave it to `mlflow run`, which logs it quoted for a shell."""
    try:
        parts = shlex.split(text)
    except ValueError:  # a single quotation mark: not quoted by MLflow
        return text
    return parts[0] if len(parts) == 1 else text
