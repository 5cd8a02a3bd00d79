"""The noise floor: distances between two runs of the baseline, and which other distances exceed them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from mlflow_compress.metrics.core.item_table import row_keys
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, Direction, MetricKey, compute, key, metric
from mlflow_compress.metrics.core.requirements import NOISE
from mlflow_compress.records import MetricResult, Records, RunRecords

R = TypeVar("R", bound=Records)


def floors() -> list[MetricKey]:
    """Return the distances that declare a noise floor, in the order of the headline table."""
    every = [key for _, found in METRICS.items() if found.noise for key in found.keys]
    floors = [key for key in every if key.floor is not None and key.floor.startswith("noise/")]
    return sorted(floors, key=lambda key: (key.headline is None, key.headline or 0, key.name))


def _floor_keys() -> tuple[MetricKey, ...]:
    """Return the key of every noise floor."""
    return tuple(
        MetricKey(
            name=str(key.floor),
            direction="neither",
            low=key.low,
            high=key.high,
            unit=key.unit,
            meaning=f"{key.name} of the baseline's second run from its first.",
        )
        for key in floors()
    )


@METRICS.register("noise_floor")
@metric(
    keys=_floor_keys,
    requires=(NOISE,),
    source="llama.cpp's habit of running the base against itself; ours for flips",
)
def noise_floor(inputs: MetricInputs) -> list[MetricResult]:
    """The pooled distances between two runs of the baseline that differ in batch composition only."""
    found = {result.name: result for result in noise_distances(inputs)}
    return [replace(found[key.name], name=str(key.floor)) for key in floors() if key.name in found]


def noise_distances(inputs: MetricInputs) -> list[MetricResult]:
    """Return every pooled distance of the baseline's second run from its first, under the distance's own name."""
    return own_distances(inputs, inputs.noise) if inputs.noise is not None else []


def own_distances(inputs: MetricInputs, again: RunRecords) -> list[MetricResult]:
    """Return every pooled distance of a model that was scored again from its first run, `inputs.baseline`."""
    settings = replace(inputs.settings, pooled_only=True)
    first = _sampled(inputs.baseline, again)
    itself = MetricInputs(first, replace(again, items=None), settings=settings)
    return [
        result
        for name, distance in METRICS.items()
        if distance.noise and itself.missing(*distance.requires) is None
        for result in compute(name, itself)
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
        traces=noise.traces,
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
