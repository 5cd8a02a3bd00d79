"""What a run publishes for gates: the far ends of the intervals of its headline values, unrounded."""

from __future__ import annotations

from collections.abc import Mapping

from mlflow_compress.metrics.core.metric_registry import all_keys
from mlflow_compress.records import MetricResult


def gate_values(pooled: Mapping[str, MetricResult]) -> dict[str, float]:
    """Return what gates read, unrounded, by the name that each metric declares for it (`MetricKey.gate`).

    An interval that is not there, or cannot be trusted, leaves its name out. `gate/kl_upper` is the upper end of the
    mean KL, only where `mean_is_trusted` says so; `gate/kl_clipped_upper` and `gate/kl_above_clip_pct_upper` stand in
    for it elsewhere: they have honest bounds at every n. `gate/kl_items` is the number of items with a KL, 0 where all
    answers are generated and a KL gate does not apply.
    """
    found: dict[str, float] = {}
    for name, key in all_keys().items():
        if key.gate is not None and name in pooled:
            value = key.gate.read(pooled[name], pooled)
            if value is not None:
                found[key.gate.name] = value
    return found
