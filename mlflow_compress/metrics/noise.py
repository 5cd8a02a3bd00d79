"""The noise floor: how far the baseline is from itself in a second run, and which distances stand out from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mlflow_compress.metrics.core.item_table import row_keys
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, Direction, MetricKey, key, metric
from mlflow_compress.metrics.divergence import divergence
from mlflow_compress.metrics.flips import flips
from mlflow_compress.metrics.kl_tail import kl_clipped
from mlflow_compress.metrics.perplexity import corpus_distance
from mlflow_compress.records import MetricResult, Records, RunRecords

R = TypeVar("R", bound=Records)

# The floors that are metrics of their own; `noise_table` has that of every distance.
_FLOORS: tuple[tuple[str, float, str], ...] = (
    ("flips_pct", 100.0, "percent"),
    ("all_flips_pct", 100.0, "percent"),
    ("kl_mean", np.inf, "nats"),
    ("top1_agreement", 1.0, "share"),
    ("corpus_kl_mean", np.inf, "nats"),
    ("corpus_top1_agreement", 1.0, "share"),
    ("corpus_dp_rms_pct", 100.0, "percent"),
)


@METRICS.register("noise_floor")
@metric(
    keys=tuple(
        MetricKey(
            name=f"noise/{name}",
            direction="neither",
            low=0.0,
            high=high,
            unit=unit,
            meaning=f"distance/{name} of the baseline's second run from its first.",
        )
        for name, high, unit in _FLOORS
    ),
    requires=("noise",),
    source="llama.cpp's habit of running the base against itself; ours for flips",
)
def noise_floor(inputs: MetricInputs) -> list[MetricResult]:
    """The pooled distances between two runs of the baseline that differ in batch composition only."""
    wanted = {f"distance/{name}": f"noise/{name}" for name, *_ in _FLOORS}
    return [replace(r, name=wanted[r.name]) for r in noise_distances(inputs) if r.name in wanted]


def noise_distances(inputs: MetricInputs) -> list[MetricResult]:
    """Return every pooled distance of the baseline's second run from its first, under the distance's own name."""
    if inputs.noise is None:
        return []
    settings = replace(inputs.settings, pooled_only=True)
    first = _sampled(inputs.baseline, inputs.noise)
    itself = MetricInputs(first, replace(inputs.noise, items=None), settings=settings)
    return [
        result
        for distance in (flips, divergence, kl_clipped, corpus_distance)
        if all(itself.missing(requirement) is None for requirement in distance.requires)
        for result in distance.compute(itself)
    ]


def _sampled(baseline: RunRecords, noise: RunRecords) -> RunRecords:
    """Return the baseline's records of what the second run covers: a sample of the items, some of a corpus's windows.

    Items and windows that the second run was not asked for are no unscored ones, and do not count.
    """
    asked = [row_keys(r) for r in (noise.items, noise.option_scores, noise.generations) if r is not None]
    windows = row_keys(noise.token_scores) if noise.token_scores is not None else None

    def rows(records: R | None, keys: pa.Array | None) -> R | None:
        if records is None or keys is None:
            return None
        return type(records)(records.table.filter(pc.is_in(row_keys(records), value_set=keys)))

    items = pa.concat_arrays(asked) if asked else None
    return RunRecords(
        items=rows(baseline.items, items),
        option_scores=rows(baseline.option_scores, items),
        generations=rows(baseline.generations, items),
        token_scores=rows(baseline.token_scores, windows),
    )


def distinguishable(distance: MetricResult, floor: MetricResult, *, direction: Direction = "lower") -> bool:
    """Return whether a distance stands out from its noise floor.

    The near end of the distance's interval must lie beyond the far end of the floor's (values, where there is no
    interval): above it for a distance where lower is better, below it for an agreement. Where neither way is better
    (a mean change, which may have either sign) the sizes are compared, and an interval that holds 0 stands out
    from nothing.
    """
    low, high = _ends(distance)
    floor_low, floor_high = _ends(floor)
    if direction == "higher":
        return high < floor_low
    if direction == "lower":
        return low > floor_high
    return not low <= 0.0 <= high and min(abs(low), abs(high)) > max(abs(floor_low), abs(floor_high))


def _ends(result: MetricResult) -> tuple[float, float]:
    if result.low is None or result.high is None:
        return result.value, result.value
    return result.low, result.high


def noise_table(inputs: MetricInputs, results: Iterable[MetricResult]) -> list[dict[str, Any]]:
    """Return one row per pooled distance: its value, its floor, and whether it can be told from noise.

    Parameters
    ----------
    inputs : MetricInputs
        With a noise run; without one every floor and label is None.
    results : iterable of MetricResult
        What `compute_all` returned for it.

    Returns
    -------
    list of dict
        `name, value, low, high, label, floor, floor_low, floor_high`; the label is "distinguishable" or "not
        distinguishable from the noise floor", and None as the floor is where the second run has no such distance.
    """
    floors = {r.name: r for r in noise_distances(inputs)}
    rows = []
    for r in results:
        if not r.name.startswith("distance/") or r.task is not None or r.category is not None:
            continue
        floor, label = floors.get(r.name), None
        if floor is not None:
            stands_out = distinguishable(r, floor, direction=key(r.name).direction)
            label = "distinguishable" if stands_out else "not distinguishable from the noise floor"
        row = {"name": r.name, "value": r.value, "low": r.low, "high": r.high, "label": label}
        ends = {"floor": floor and floor.value, "floor_low": floor and floor.low, "floor_high": floor and floor.high}
        rows.append({**row, **ends})
    return rows
