"""Formats numbers: with the digits that their interval supports, shares as percent, differences in points."""

import math
from dataclasses import dataclass, replace

from mlflow_compress.records import MetricResult


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Factor, unit and decimals with which a metric is shown."""

    factor: float = 1.0  # The value is multiplied by it (100 for shares that are shown as percent)
    suffix: str = ""  # Unit after a value, and after a difference of two values
    difference_suffix: str = ""
    decimals: int = 2  # Smallest number of decimals; an interval may need more


SHARE = Scale(factor=100.0, suffix=" %", difference_suffix=" pt", decimals=1)
PERCENT = Scale(suffix=" %", difference_suffix=" pt", decimals=1)
PLAIN_SCALE = Scale()
NATS = Scale(decimals=0)
_TIMES = Scale(suffix="x", difference_suffix="x")

_SCALES = {
    "share": SHARE,
    "percent": PERCENT,
    "nats": NATS,
    "tokens": Scale(decimals=0),
    "times": _TIMES,
    "seconds": Scale(suffix=" s", decimals=1),
}

_MOST_DECIMALS = 6
_SIGNIFICANT = 3
_SAME_SIZE = "same size"
_SPARSE = (
    0.1  # share of zeros below which a model is not called pruned: a trained one may have some, the demo has 4.6 %
)


def scale_of(unit: str) -> Scale:
    """Return the scale of a unit of `MetricKey`."""
    return _SCALES.get(unit, PLAIN_SCALE)


def number_text(result: MetricResult, unit: str, *, difference: bool = False, interval: bool = True) -> str:
    """Return a number in its unit, with its interval if wanted and there is one."""
    if unit == "bytes":
        return bytes_text(round(result.value))
    scale = scale_of(unit)
    bare = not interval or (unit in ("times", "bits", "seconds") and result.low is None)
    if bare and unit != "nats":
        return plain(scale.factor * result.value, max(scale.decimals, 1)) + scale.suffix
    return interval_text(result if interval else replace(result, low=None, high=None), scale, difference=difference)


def decimals(value: float, low: float | None, high: float | None, *, fewest: int) -> int:
    """Return the number of decimals of a value and its interval, at least `fewest`.

    They show one digit of the interval's half-width (two if the first is 1), or three digits of the value.
    """
    digits = 0 if value == 0 else _SIGNIFICANT - 1 - math.floor(math.log10(abs(value)))
    if low is not None and high is not None and (half := (high - low) / 2):
        digits = -math.floor(math.log10(half))
        digits += half * 10**digits < 1.999
    return max(fewest, min(digits, 12))


def plain(value: float, digits: int, *, signed: bool = False) -> str:
    """Return a number with fixed decimals, or in exponent form if these would show zeros only."""
    if value == 0:
        return f"+{0:.{min(digits, _MOST_DECIMALS)}f}" if signed else "0"
    if digits > 4 and abs(value) < 1e-4:
        return f"{value:+.1e}" if signed else f"{value:.1e}"
    text = f"{value:{'+' if signed else ''}.{min(digits, _MOST_DECIMALS)}f}"
    if float(text) == 0:
        return f"{value:+.1g}" if signed else f"{value:.1g}"
    return text


def value_text(result: MetricResult, scale: Scale) -> str:
    """Return a value without its interval, as in "57.5 %"."""
    value = scale.factor * result.value
    low, high = (None if v is None else scale.factor * v for v in (result.low, result.high))
    # A value of one model is compared with its neighbour in the table, so it has at least three digits.
    fewest = max(scale.decimals, 0 if value == 0 or scale is not NATS else decimals(value, None, None, fewest=0))
    return plain(value, decimals(value, low, high, fewest=fewest)) + scale.suffix


def interval_text(result: MetricResult, scale: Scale, *, difference: bool) -> str:
    """Return a value with its interval, as in "-0.4 pt [-1.9, 1.1]", or "5 [3 or more]" without an upper end."""
    value = scale.factor * result.value
    suffix = scale.difference_suffix if difference else scale.suffix
    if result.low is None:
        return plain(value, decimals(value, None, None, fewest=scale.decimals), signed=difference) + suffix
    low = scale.factor * result.low
    if result.high is None:
        return f"{plain(value, scale.decimals, signed=difference)}{suffix} [{plain(low, scale.decimals)} or more]"
    high = scale.factor * result.high
    digits = decimals(value, low, high, fewest=scale.decimals)
    text = plain(value, digits, signed=difference) + suffix
    if low == high:
        return text  # the bootstrap of a constant has no width
    return f"{text} [{plain(low, digits)}, {plain(high, digits)}]"


def bytes_text(n: int) -> str:
    """Return a size in decimal units, as in "15.1 MB"."""
    size = float(n)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def ratio_text(ratio: float) -> str:
    """Return a size ratio in words: "3.6x smaller", "same size", "1.2x larger"."""
    if abs(ratio - 1) < 0.005:
        return _SAME_SIZE
    if ratio > 1:
        return f"{ratio:.2f}x smaller" if ratio < 1.1 else f"{ratio:.1f}x smaller"
    return f"{1 / ratio:.2f}x larger" if ratio > 1 / 1.1 else f"{1 / ratio:.1f}x larger"


def saved_dense(ratio: float, sparsity: float | None) -> bool:
    """Return whether a model is pruned (a share of its weights is 0), but stored with its zeros at the same size."""
    return ratio_text(ratio) == _SAME_SIZE and sparsity is not None and sparsity >= _SPARSE


def size_text(ratio: float, sparsity: float | None = None) -> str:
    """Return a size ratio in words, with a remark if a pruned model is stored with its zeros."""
    if sparsity is not None and saved_dense(ratio, sparsity):
        return f"same size on disk (saved dense), {100 * sparsity:.0f} % zeros"
    return ratio_text(ratio)


def duration(seconds: float) -> str:
    """Return a duration in a readable unit: "less than 1 s", "40 s", "12 min", "3.5 h"."""
    if 0 < seconds < 1:
        return "less than 1 s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def duration_text(seconds: float) -> str:
    """Return an estimated duration: "about 40 s", "less than 1 s"."""
    text = duration(seconds)
    return text if text.startswith("less") else f"about {text}"
