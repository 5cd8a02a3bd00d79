"""What a run publishes for gates: the far ends of the intervals of its headline values, unrounded."""

from __future__ import annotations

from collections.abc import Mapping

from mlflow_compress.decide.promotion import (
    GATE_DROP,
    GATE_FLIPS,
    GATE_KL,
    GATE_KL_CLIPPED,
    GATE_KL_ITEMS,
    GATE_KL_OUTLIERS,
)
from mlflow_compress.metrics.kl_tail import mean_is_trusted
from mlflow_compress.records import MetricResult


def gate_values(pooled: Mapping[str, MetricResult]) -> dict[str, float]:
    """Return what gates read, unrounded; an interval that is not there, or cannot be trusted, leaves its key out.

    `gate/kl_upper` is the upper end of the mean KL, only where `mean_is_trusted` says so; `gate/kl_clipped_upper` and
    `gate/kl_above_clip_pct_upper`, which have honest bounds at every n, stand in for it elsewhere. `gate/kl_items` is
    the number of items with a KL, 0 where all answers are generated and a KL gate does not apply.
    """
    found: dict[str, float] = {}
    kl, items, delta = (
        pooled.get(name) for name in ("distance/kl_mean", "distance/kl_items", "quality/accuracy_delta")
    )
    if kl is not None and kl.high is not None and mean_is_trusted(kl, pooled.get("distance/kl_share_top_item_pct")):
        found[GATE_KL] = kl.high
    for key, name in (
        (GATE_KL_CLIPPED, "distance/kl_clipped_mean"),
        (GATE_KL_OUTLIERS, "distance/kl_above_clip_pct"),
        (GATE_FLIPS, "distance/flips_pct"),
    ):
        result = pooled.get(name)
        if result is not None and result.high is not None:
            found[key] = result.high
    if items is not None:
        found[GATE_KL_ITEMS] = items.value
    if delta is not None and delta.low is not None:
        found[GATE_DROP] = -100.0 * delta.low
    return found
