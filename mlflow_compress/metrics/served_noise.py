"""The noise of a server: the distance of a served variant's second answers from its first."""

from __future__ import annotations

from dataclasses import replace

from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, MetricKey, metric
from mlflow_compress.metrics.core.requirements import ASKED_AGAIN, OPTION_DISTANCES, TOKEN_DISTANCES, VARIANT
from mlflow_compress.metrics.noise import floors, own_distances
from mlflow_compress.records import MetricResult


def _name(key: MetricKey) -> str:
    return str(key.floor).replace("noise/", "served/")


def _distances() -> list[MetricKey]:
    """Return the distances that a server shows: those of answers, and bounds from lists of tokens."""
    whole = {OPTION_DISTANCES, TOKEN_DISTANCES}
    floored = [found for _, found in METRICS.items() if found.noise]
    shown = {key.name for found in floored if not whole & set(found.requires) for key in found.keys}
    return [key for key in floors() if key.name in shown]


def _keys() -> tuple[MetricKey, ...]:
    return tuple(
        MetricKey(
            name=_name(key),
            direction="neither",
            low=key.low,
            high=key.high,
            unit=key.unit,
            meaning=f"{key.name} of the served variant's second answers from its first, to the same prompts.",
            on_request=True,
        )
        for key in _distances()
    )


@METRICS.register("served_noise")
@metric(keys=_keys, requires=(VARIANT, ASKED_AGAIN), source="ours")
def served_noise(inputs: MetricInputs) -> list[MetricResult]:
    """The pooled distances between two answers of a served variant to the same prompts.

    They are measured on the sample of the noise floor, which is that of the baseline: a server that batches, or shares
    its GPU, adds noise of its own. The second time, nothing is taken from what was kept of the first.
    """
    if inputs.variant is None or inputs.asked_again is None:
        return []
    itself = MetricInputs(inputs.variant, settings=inputs.settings)
    found = {result.name: result for result in own_distances(itself, inputs.asked_again)}
    return [replace(found[key.name], name=_name(key)) for key in _distances() if key.name in found]
