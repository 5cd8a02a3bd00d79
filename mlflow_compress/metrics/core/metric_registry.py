"""Declarations of metrics and their keys, and the registry of metrics."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, Requirement
from mlflow_compress.metrics.core.requirements import OF_ITEMS
from mlflow_compress.records import MetricResult
from mlflow_compress.registry import Registry

Direction = Literal["higher", "lower", "neither"]

# fp32 divergences of nearly equal distributions may fall this far below zero by rounding.
_ROUNDING = 1e-6

Pooled = Mapping[str, MetricResult]

TOO_LONG = "an option is longer than the model's context"
"""Why an item has no prediction."""


@dataclass(frozen=True)
class GateValue:
    """What a promotion gate reads of a metric."""

    name: str  # Under which it is published, "gate/<what>"
    # Takes it from the pooled result; None where there is nothing that a gate may trust
    read: Callable[[MetricResult, Pooled], float | None]
    factor: float = 1.0  # What turns a value of the metric into the published unit


def upper_end(result: MetricResult, pooled: Pooled) -> float | None:
    """Return the upper end of the interval, which a gate with a limit reads; None without an interval."""
    return result.high


@dataclass(frozen=True, kw_only=True)
class MetricKey:
    """One number that a metric returns, under its MLflow name, and how it is shown."""

    name: str  # "<section>/<metric>"; the section becomes a chart group
    direction: Direction = "neither"  # Which way is better for the variant
    low: float = 0.0  # Bounds that the value cannot leave
    high: float = math.inf
    # "share", "percent", "nats", "points", "options", "perplexity", "ratio", "times", "probability", "cosine", "items",
    # "tokens", "correlation", or what is written behind the value
    unit: str
    meaning: str  # One sentence for a reader of the table
    label: str = ""  # Short text for tables
    headline: int | None = None  # Place of its row in the headline table, counted upwards; without it there is no row
    # Whether the row's value is on the variant's main run too, whose page in MLflow shows about 30
    on_main_run: bool = True
    # Whether it is a column of the leaderboard in MLflow. Its place there is that of the row.
    leaderboard: bool = False
    by_task: bool = False  # Whether MLflow shows the value of every task too
    by_category: bool = True  # Whether there is a value for every category
    unchanged: float = 0.0  # Value for a variant that equals its baseline
    # For a value that each model has (`<name>_baseline` is the baseline's): name of the variant's minus the baseline's.
    # Its row shows all three.
    difference: str | None = None
    # Name of its noise floor: the value that two equal models have. "noise/<metric>" is declared and computed by
    # itself, from the baseline's second run, for a metric with `noise=True`.
    floor: str | None = None
    counted: str = "items"  # What `n` counts: "items", "tokens", "answers" or "instructions"
    unscored: str = ""  # Why something may have no value; without it no footnote counts what has none
    gate: GateValue | None = None  # What a promotion gate reads of it
    gate_label: str = ""  # What the reasons of a gate call it; without it, its name
    # Whether it is computed only where something more is asked for. A failed stage is not said to lack it.
    on_request: bool = False
    # What users of the model notice of it, in words, for the sentence "For users"
    noticed: str = ""
    worst_of_slices: bool = False  # Whether the pooled value is the largest of those by slice

    @property
    def is_difference(self) -> bool:
        """Whether it is a variant's value minus its baseline's, which is shown with its sign."""
        return self.name.endswith(("_delta", "_delta_pct"))

    def __post_init__(self) -> None:
        number = isinstance(self.headline, int) and not isinstance(self.headline, bool)
        wrong = {
            "name": (bool(re.fullmatch(r"[^\s/]+/[^\s]+", self.name)), "<section>/<metric>, without spaces"),
            "direction": (self.direction in get_args(Direction), ", ".join(get_args(Direction))),
            "low": (self.low < self.high, f"less than high ({self.high})"),
            "headline": (self.headline is None or number, "a whole number: the place of the row, or None for no row"),
            "label": (self.headline is None or bool(self.label), "a short text, because the metric has a row"),
            "gate": (self.gate is None or isinstance(self.gate, GateValue), "a GateValue, or None for no gate"),
        }
        for field, (right, allowed) in wrong.items():
            if not right:
                raise ConfigError(
                    f"The key {self.name!r} of a metric declares a wrong {field}",
                    allowed=allowed,
                    got=str(getattr(self, field)) or "nothing",
                )

    @classmethod
    def share(cls, name: str, direction: Direction, meaning: str, *, low: float = 0.0, **more: Any) -> "MetricKey":
        return cls(name=name, direction=direction, low=low, high=1.0, unit="share", meaning=meaning, **more)

    @classmethod
    def percent(cls, name: str, direction: Direction, meaning: str, *, low: float = 0.0, **more: Any) -> "MetricKey":
        return cls(name=name, direction=direction, low=low, high=100.0, unit="percent", meaning=meaning, **more)

    @classmethod
    def probability(cls, name: str, direction: Direction, meaning: str, **more: Any) -> "MetricKey":
        return cls(name=name, direction=direction, low=0.0, high=1.0, unit="probability", meaning=meaning, **more)


def keys_of(section: str, **shared: Any) -> Callable[..., MetricKey]:
    """Return what makes a key of a section from name, direction and meaning; fields of its own override `shared`."""

    def declare(name: str, direction: Direction, meaning: str, **own: Any) -> MetricKey:
        return MetricKey(name=f"{section}/{name}", direction=direction, meaning=meaning, **{**shared, **own})

    return declare


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A registered metric: what it returns, what it requires, where its definition comes from, and the function."""

    # Every name that `compute` may return; a callable where they follow from other metrics' keys
    declares: tuple[MetricKey, ...] | Callable[[], tuple[MetricKey, ...]]
    requires: tuple[Requirement, ...]  # Parts of the inputs that must be there
    source: str  # The paper or program that defines it, and any deviation from it
    function: Callable[[MetricInputs], list[MetricResult]]  # From the inputs to results; pure
    # Whether it is also computed for the baseline's second run, as the noise floor of its distances
    noise: bool = False
    # Whether its estimates weight items that were drawn with unequal probabilities, as those of `MetricInputs.units`
    # do. A metric of items that does not is left out there, with the reason.
    weighted: bool = False

    @property
    def is_own(self) -> bool:
        """Whether it is this package's, and no plug-in's."""
        return self.function.__module__.startswith("mlflow_compress.")

    @property
    def keys(self) -> tuple[MetricKey, ...]:
        """Every key that `compute` may return."""
        return self.declares() if callable(self.declares) else self.declares

    def compute(self, inputs: MetricInputs, *, origin: str = "") -> list[MetricResult]:
        """Return the results, after checking that each is declared, finite and within its bounds.

        - `inputs`: What it is computed from; the requirements are met.
        - `origin`: Which plug-in it is, for messages; "" for a metric of this package.
        """
        declared = {key.name: key for key in self.keys}
        who, of = (f"The {origin}", f" of the {origin}") if origin else ("A metric", "")
        results = self.function(inputs)
        if not isinstance(results, list) or not all(isinstance(result, MetricResult) for result in results):
            allowed = "a list of MetricResult, as by_subset and pooled return it"
            raise ConfigError(f"{who} did not return results", allowed=allowed, got=type(results).__name__)
        for result in results:
            key = declared.get(result.name)
            if key is None:
                raise ConfigError(f"{who} returned a key that it does not declare", allowed=declared, got=result.name)
            for value in (result.value, result.low, result.high):
                if value is not None and not math.isfinite(value):
                    raise DataError(f"{result.name}{of} is not a finite number", got=result.value)
            if not key.low - _ROUNDING <= result.value <= key.high + _ROUNDING:
                raise DataError(f"{result.name}{of} left its bounds [{key.low}, {key.high}]", got=result.value)
        return results


METRICS: Registry[Metric] = Registry("metric", "mlflow_compress.metrics", group="mlflow_compress.metrics")


def metric(
    name: str,
    *,
    keys: tuple[MetricKey, ...] | Callable[[], tuple[MetricKey, ...]],
    requires: tuple[Requirement, ...],
    source: str,
    noise: bool = False,
    weighted: bool = False,
) -> Callable[[Callable[[MetricInputs], list[MetricResult]]], Metric]:
    """Return a decorator that registers a function of the inputs as a `Metric` with these attributes."""
    for what, given, kind in (("keys", () if callable(keys) else keys, MetricKey), ("requires", requires, Requirement)):
        if not isinstance(given, tuple) or not all(isinstance(one, kind) for one in given):
            raise ConfigError(f"A metric declares wrong {what}", allowed=f"a tuple of {kind.__name__}", got=str(given))

    def decorate(function: Callable[[MetricInputs], list[MetricResult]]) -> Metric:
        made = Metric(
            declares=keys, requires=requires, source=source, function=function, noise=noise, weighted=weighted
        )
        return METRICS.register(name)(made)

    return decorate


def compute(name: str, inputs: MetricInputs) -> list[MetricResult]:
    """Return the results of a registered metric; what goes wrong in a plug-in names it, its package and its file."""
    declared = METRICS.get(name)
    if declared.is_own:
        return declared.compute(inputs)
    with METRICS.blaming(name):
        return declared.compute(inputs, origin=METRICS.origin(name))


NOT_DRAWN = "it needs every item, and the variant was scored on drawn ones (parameter items)"
"""Why a metric is left out that cannot be computed from items that were drawn with unequal probabilities."""


def unmet(inputs: MetricInputs) -> dict[str, str]:
    """Return the metrics that cannot be computed from the inputs, by name, with the first reason for each."""
    reasons = {name: inputs.missing(*metric.requires) for name, metric in METRICS.items()}
    if inputs.draws is not None:
        whole = MetricInputs(inputs.whole_baseline)
        for name, metric in METRICS.items():
            # What the baseline has of all items, and the variant's records do not, was not drawn.
            gone = any(one.missing(inputs) and not one.missing(whole) for one in metric.requires)
            plain = inputs.design is not None and reasons[name] is None and not metric.weighted
            if OF_ITEMS & set(metric.requires) and (gone or plain):
                reasons[name] = NOT_DRAWN
    return {name: reason for name, reason in reasons.items() if reason is not None}


def compute_all(inputs: MetricInputs) -> list[MetricResult]:
    """Return the results of every registered metric whose requirements are met, in the order of the metrics' names.

    Headline values have neither task nor category; the same keys by task and by category follow them.
    """
    skipped = unmet(inputs)
    return [result for name in METRICS.names() if name not in skipped for result in compute(name, inputs)]


def all_keys() -> dict[str, MetricKey]:
    """Return every declared key by name; one that two metrics declare is a `ConfigError`: one would hide the other."""
    keys: dict[str, MetricKey] = {}
    owners: dict[str, str] = {}
    for name, registered in METRICS.items():
        for declared in registered.keys:
            if declared.name in keys:
                owner = owners[declared.name]
                raise ConfigError(f"The metrics {owner!r} and {name!r} declare the same key", got=declared.name)
            keys[declared.name], owners[declared.name] = declared, name
    return keys


def key(name: str) -> MetricKey:
    """Return the declaration of one MLflow metric key, or raise `ConfigError` naming those that exist."""
    keys = all_keys()
    if name not in keys:
        raise ConfigError("Unknown metric key", allowed=sorted(keys), got=name)
    return keys[name]


def headline_keys() -> list[MetricKey]:
    """Return the keys that have a row in the headline table, in its order."""
    rows = [
        (declared.headline, name, declared) for name, declared in all_keys().items() if declared.headline is not None
    ]
    return [declared for _, _, declared in sorted(rows, key=lambda row: row[:2])]


def plugin_keys() -> list[MetricKey]:
    """Return the keys of the metrics of other packages."""
    return [declared for _, metric in METRICS.items() if not metric.is_own for declared in metric.keys]


def leaderboard_keys() -> list[MetricKey]:
    """Return the keys that are columns of the leaderboard, each followed by its difference where that is one too."""
    every = all_keys()
    ordered = [part for row in headline_keys() for part in (row, every.get(row.difference or ""))]
    return [declared for declared in ordered if declared is not None and declared.leaderboard]
