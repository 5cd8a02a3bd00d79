"""What a metric declares, and the registry that holds every one of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.records import MetricResult
from mlflow_compress.registry import Registry

if TYPE_CHECKING:
    from mlflow_compress.metrics.core.metric_inputs import MetricInputs

Direction = Literal["higher", "lower", "neither"]

# fp32 divergences of nearly equal distributions may fall this far below zero by rounding.
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class MetricKey:
    """One number that a metric returns, under its MLflow name.

    Attributes
    ----------
    name : str
        "<section>/<metric>"; the section becomes a chart group.
    direction : {"higher", "lower", "neither"}
        Which way is better for the variant.
    low, high : float
        Bounds that the value cannot leave.
    unit : str
        "share", "percent", "nats", "points", "options", "perplexity", "ratio", "probability" or
        "correlation".
    meaning : str
        One sentence for a reader of the table.
    """

    name: str
    direction: Direction
    low: float
    high: float
    unit: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A registered metric: what it returns, what it requires, where its definition comes from, and the function.

    Attributes
    ----------
    keys : tuple of MetricKey
        Every name that `compute` may return.
    requires : tuple of str
        Parts of the inputs that must be there; see `MetricInputs.missing`.
    source : str
        The paper or program that defines it, and any deviation from it.
    function : callable
        From the inputs to results; pure.
    """

    keys: tuple[MetricKey, ...]
    requires: tuple[str, ...]
    source: str
    function: Callable[[MetricInputs], list[MetricResult]]

    def compute(self, inputs: MetricInputs) -> list[MetricResult]:
        """Return the results, after checking that each is declared, finite and within its bounds.

        Raises
        ------
        DataError
            When a value is NaN, infinite or outside its bounds: the records are broken.
        """
        declared = {key.name: key for key in self.keys}
        results = self.function(inputs)
        for result in results:
            key = declared[result.name]
            for value in (result.value, result.low, result.high):
                if value is not None and not math.isfinite(value):
                    raise DataError(f"{result.name} is not a finite number", got=result.value)
            if not key.low - _ROUNDING <= result.value <= key.high + _ROUNDING:
                raise DataError(f"{result.name} left its bounds [{key.low}, {key.high}]", got=result.value)
        return results


METRICS: Registry[Metric] = Registry("metric", "mlflow_compress.metrics", group="mlflow_compress.metrics")


def metric(
    *, keys: tuple[MetricKey, ...], requires: tuple[str, ...], source: str
) -> Callable[[Callable[[MetricInputs], list[MetricResult]]], Metric]:
    """Return a decorator that turns a function of the inputs into a `Metric`."""

    def decorate(function: Callable[[MetricInputs], list[MetricResult]]) -> Metric:
        return Metric(keys=keys, requires=requires, source=source, function=function)

    return decorate


def all_keys() -> dict[str, MetricKey]:
    """Return every declared key by name."""
    return {key.name: key for _, registered in METRICS.items() for key in registered.keys}


def key(name: str) -> MetricKey:
    """Return the declaration of one MLflow metric key, or raise `ConfigError` naming those that exist."""
    found = all_keys()
    if name not in found:
        raise ConfigError("Unknown metric key", allowed=sorted(found), got=name)
    return found[name]
