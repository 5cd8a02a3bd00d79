"""The engine's own distance: the baseline's checkpoint under transformers, from itself in the engine that runs it."""

from __future__ import annotations

from dataclasses import replace

from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, MetricKey, metric
from mlflow_compress.metrics.core.requirements import ENGINE, OPTION_BOUNDS
from mlflow_compress.metrics.noise import floors, own_distances
from mlflow_compress.records import MetricResult


def _name(key: MetricKey) -> str:
    return str(key.floor).replace("noise/", "engine/")


def _distances() -> list[MetricKey]:
    """Return the distances that both engines have; bounds from lists of tokens are for models behind a server."""
    bounds = {key.name for _, found in METRICS.items() if OPTION_BOUNDS in found.requires for key in found.keys}
    return [key for key in floors() if key.name not in bounds]


def _keys() -> tuple[MetricKey, ...]:
    return tuple(
        MetricKey(
            name=_name(key),
            direction="neither",
            low=key.low,
            high=key.high,
            unit=key.unit,
            meaning=f"{key.name} of transformers from another engine (vLLM), with the baseline's checkpoint in both.",
            on_request=True,
        )
        for key in _distances()
    )


@METRICS.register("engine_distance")
@metric(keys=_keys, requires=(ENGINE,), source="ours")
def engine_distance(inputs: MetricInputs) -> list[MetricResult]:
    """The pooled distances between two engines on one checkpoint: what another engine than vLLM's would move by itself.

    They are measured on the sample of the noise floor. The reference is the engine that runs baseline and variant.
    """
    if inputs.engine is None:
        return []
    found = {result.name: result for result in own_distances(inputs, inputs.engine)}
    return [replace(found[key.name], name=_name(key)) for key in _distances() if key.name in found]
