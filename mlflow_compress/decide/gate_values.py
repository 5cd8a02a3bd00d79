"""The values that gates read: ends of the intervals of headline values, unrounded."""

from __future__ import annotations

from collections.abc import Mapping

from mlflow_compress.metrics.core.metric_registry import all_keys
from mlflow_compress.records import MetricResult


def gate_values(pooled: Mapping[str, MetricResult]) -> dict[str, float]:
    """Return the unrounded values that gates read, by the names that metrics declare for them (`MetricKey.gate`).

    A value is left out if its interval is missing or cannot be trusted. `gate/kl_upper` is the upper end of the mean
    KL's interval. It is left out if `mean_is_trusted` is false. Gates then read `gate/kl_clipped_upper` and
    `gate/kl_above_clip_pct_upper`, whose bounds are valid for every n. `gate/kl_items` is the number of items with a
    KL. It is 0 if all answers are generated; then the KL gate does not apply.
    """
    found: dict[str, float] = {}
    for name, key in all_keys().items():
        if key.gate is not None and name in pooled:
            value = key.gate.read(pooled[name], pooled)
            if value is not None:
                found[key.gate.name] = value
    return found
