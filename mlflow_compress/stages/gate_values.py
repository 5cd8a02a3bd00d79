"""The numbers that promotion gates read: upper ends of 95 % intervals, unrounded."""

from __future__ import annotations

from collections.abc import Mapping

from mlflow_compress.promotion import GATE_DROP, GATE_FLIPS, GATE_KL
from mlflow_compress.records import MetricResult

DELTA = "quality/accuracy_delta"


def gate_values(pooled: Mapping[str, MetricResult]) -> dict[str, float]:
    """Return the upper ends that gates read, unrounded; an interval that is not there leaves its key out."""
    found: dict[str, float] = {}
    kl, flips, delta = (pooled.get(f"{name}") for name in ("distance/kl_mean", "distance/flips_pct", DELTA))
    if kl is not None and kl.high is not None:
        found[GATE_KL] = kl.high
    if flips is not None and flips.high is not None:
        found[GATE_FLIPS] = flips.high
    if delta is not None and delta.low is not None:
        found[GATE_DROP] = -100.0 * delta.low
    return found
