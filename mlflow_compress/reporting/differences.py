"""Decides which differences are distinguishable: from no change, and from the noise floor."""

from __future__ import annotations

from collections.abc import Mapping

from mlflow_compress.metrics.core.metric_registry import key
from mlflow_compress.records import MetricResult


def _side(change: float, direction: str) -> str:
    if direction == "neither":
        return "yes"
    return "yes, better" if (change > 0) == (direction == "higher") else "yes, worse"


def separates(result: MetricResult, unchanged: float) -> str | None:
    """Return whether the interval of a difference excludes `unchanged`, that is, "no change"; None without interval."""
    if result.value == unchanged and (result.low is None or result.low == result.high):
        return "no: exactly the same"
    if result.low is None or result.high is None:
        return None
    if result.low <= unchanged <= result.high:
        return "no"
    return _side(result.value - unchanged, key(result.name).direction)


def above_floor(result: MetricResult, floor: MetricResult | None, unchanged: float) -> str:
    """Return whether a distance exceeds its noise floor. `unchanged` is the distance of equal models."""
    if result.value == unchanged:
        counted = (
            result.low is not None and result.low != result.high
        )  # no event in n items does not mean that there is never one
        return f"no: none in {result.n:,}" if counted else "no: exactly the same"
    grows = unchanged == 0.0
    if floor is None:
        near = result.low if grows else result.high
        near = result.value if near is None else near
        return "yes, no noise floor measured" if (near > unchanged) == grows and near != unchanged else "no"
    if grows:
        exceeds = (result.value if result.low is None else result.low) > (
            floor.value if floor.high is None else floor.high
        )
    else:
        exceeds = (result.value if result.high is None else result.high) < (
            floor.value if floor.low is None else floor.low
        )
    return "yes" if exceeds else "no: overlaps the noise floor"


def noise_floor(pooled: Mapping[str, MetricResult], name: str) -> MetricResult | None:
    """Return the noise floor of a distance, `noise/<metric>` for `distance/<metric>`; None if it was not measured."""
    return pooled.get("noise/" + name.partition("/")[2])
