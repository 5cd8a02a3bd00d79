"""The noise floor: how far the baseline is from itself in a second run, and which distances stand out from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import numpy as np

from mlflow_compress.metrics.divergence import divergence
from mlflow_compress.metrics.evidence import Evidence
from mlflow_compress.metrics.flips import flips
from mlflow_compress.metrics.perplexity import corpus_distance
from mlflow_compress.metrics.registry import METRICS, Direction, Key, metric
from mlflow_compress.records import MetricResult

Label = Literal["distinguishable", "not distinguishable from the noise floor"]

_FLOORS: tuple[tuple[str, Direction, float, str], ...] = (
    ("flips_pct", "lower", 100.0, "percent"),
    ("all_flips_pct", "lower", 100.0, "percent"),
    ("kl_mean", "lower", np.inf, "nats"),
    ("top1_agreement", "higher", 1.0, "share"),
    ("corpus_kl_mean", "lower", np.inf, "nats"),
    ("corpus_top1_agreement", "higher", 1.0, "share"),
    ("corpus_dp_rms_pct", "lower", 100.0, "percent"),
)
_DIRECTIONS: dict[str, Direction] = {f"distance/{name}": direction for name, direction, _, _ in _FLOORS}


@METRICS.register("noise_floor")
@metric(
    keys=tuple(
        Key(
            name=f"noise/{name}",
            direction="neither",
            low=0.0,
            high=high,
            unit=unit,
            meaning=f"distance/{name} of the baseline's second run from its first.",
        )
        for name, _, high, unit in _FLOORS
    ),
    needs=("noise",),
    source="llama.cpp's habit of running the base against itself; ours for flips",
)
def noise_floor(evidence: Evidence) -> list[MetricResult]:
    """The pooled distances between two runs of the baseline that differ in batch composition only."""
    if evidence.noise is None:
        return []
    # The second run may cover fewer items: only its own rows are compared.
    settings = replace(evidence.settings, pooled_only=True)
    itself = Evidence(evidence.baseline, replace(evidence.noise, items=None), settings=settings)
    wanted = {f"distance/{name}": f"noise/{name}" for name, *_ in _FLOORS}
    results = []
    for distance in (flips, divergence, corpus_distance):
        if any(itself.missing(need) is not None for need in distance.needs):
            continue
        for r in distance.compute(itself):
            if r.name in wanted:
                results.append(replace(r, name=wanted[r.name]))
    return results


def distinguishable(distance: MetricResult, floor: MetricResult, *, direction: Direction = "lower") -> bool:
    """Return whether a distance stands out from its noise floor.

    The near end of the distance's interval (its value where it has none) must lie beyond the floor's value: above it
    for a distance where lower is better, below it for an agreement.
    """
    if direction == "higher":
        return (distance.value if distance.high is None else distance.high) < floor.value
    return (distance.value if distance.low is None else distance.low) > floor.value


def noise_labels(results: Iterable[MetricResult]) -> dict[str, Label]:
    """Return, for every pooled distance that has a floor among `results`, whether it can be told from noise.

    Parameters
    ----------
    results : iterable of MetricResult
        What `compute_all` returned for evidence with a noise run.
    """
    pooled = {r.name: r for r in results if r.task is None and r.category is None}
    labels: dict[str, Label] = {}
    for name, direction in _DIRECTIONS.items():
        floor = pooled.get(name.replace("distance/", "noise/"))
        if name in pooled and floor is not None:
            stands_out = distinguishable(pooled[name], floor, direction=direction)
            labels[name] = "distinguishable" if stands_out else "not distinguishable from the noise floor"
    return labels
