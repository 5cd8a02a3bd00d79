"""Which variants a sweep makes: every combination that a method supports, and why the others are left out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mlflow_compress.compression.method import METHODS, MethodConfig
from mlflow_compress.compression.method_settings import AUTO
from mlflow_compress.config import CompressionConfig, MainConfig, SweepConfig, is_endpoint
from mlflow_compress.errors import ConfigError, MissingDependencyError, UnsupportedError
from mlflow_compress.files.yaml_text import read_yaml
from mlflow_compress.paths import absolute_paths
from mlflow_compress.stages.main_run.checked_parameters import check_served, name_of
from mlflow_compress.stages.model_names import SERVED_METHOD
from mlflow_compress.stages.quantize import method_settings

_AXES = {"methods": "method"}  # a name that is clearer with several values
_OF_SERVED = ("checkpoint", "served_model", "tokenizer")
_IN_GRID = (*(name for name in CompressionConfig.model_fields if name != "output_dir"), *_OF_SERVED[1:])
_SHARED = ("calibration", "calibration_samples", "calibration_length", "method_args")
_GIVEN = ("methods", "bits", "group_size")


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One variant of a sweep.

    Attributes
    ----------
    name : str
        Its short name, such as "awq-4bit-g128".
    config : MainConfig
        The parameters of its main job.
    settings : MethodConfig or None
        The method's checked settings; None of a served model.
    """

    name: str
    config: MainConfig
    settings: MethodConfig | None

    @property
    def method(self) -> str:
        """The method that makes it."""
        return SERVED_METHOD if self.settings is None else self.config.compression.method

    @property
    def own_settings(self) -> dict[str, Any]:
        """The method's settings by name; none of a served model."""
        return {} if self.settings is None else self.settings.settings()

    @property
    def shown(self) -> dict[str, object]:
        """What tells it from another variant of its name."""
        if self.settings is None:
            return {"checkpoint": self.config.compression.checkpoint, "tokenizer": self.config.served.tokenizer}
        return {**self.own_settings, "calibration": Path(self.config.compression.calibration).name}


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A combination that is not made.

    Attributes
    ----------
    name, method : str
        What was asked for, and its method.
    reason : str
        Why its method does not support it.
    """

    name: str
    method: str
    reason: str


def combinations(config: SweepConfig) -> tuple[list[Combination], list[LeftOut]]:
    """Return the variants of a sweep, and the combinations that no method supports.

    A method without a setting such as bits takes part once. Two combinations with equal settings are one variant.

    Raises
    ------
    ConfigError
        An unknown method, bits that are no number, a broken grid, or no combination that is supported.
    """
    found: dict[tuple[str, str], Combination] = {}
    left_out: dict[str, LeftOut] = {}
    for asked in _asked(config):
        method, given = asked.get("method", SERVED_METHOD), _own(asked)
        try:
            variant = absolute_paths(config.main_config(**given))
            settings = _settings(variant)
        except (UnsupportedError, MissingDependencyError) as error:
            name = _described(given)
            left_out.setdefault(name, LeftOut(name=name, method=method, reason=str(error)))
            continue
        known = variant.served if settings is None else variant.compression.calibration
        key = (method, repr((settings, variant.compression.checkpoint, known)))
        name = name_of(variant)
        found.setdefault(key, Combination(name=name, config=variant, settings=settings))
    if not found:
        reasons = [f"{one.name}: {one.reason}" for one in left_out.values()]
        raise ConfigError("No combination of this sweep is supported", got="; ".join(reasons) or "an empty grid")
    return _with_own_names(found.values()), list(left_out.values())


def _settings(variant: MainConfig) -> MethodConfig | None:
    """Return the checked settings of a variant's method; None of a served model, whose parameters are checked too."""
    if variant.is_served:
        check_served(variant)
        return None
    settings = method_settings(variant.quantize_config)
    METHODS.get(variant.compression.method).require_backend(settings)
    return settings


def _asked(config: SweepConfig) -> Iterable[dict[str, str]]:
    """Return every combination of the axes, from the grid or from the parameters."""
    axes = config.variants
    if axes.grid is None:
        return _product({name: _split(getattr(axes, name)) for name in _GIVEN})
    default = SweepConfig().variants
    if twice := [name for name in _GIVEN if getattr(axes, name) != getattr(default, name)]:
        raise ConfigError(
            f"Parameter '{twice[0]}' is given beside a grid", got=getattr(axes, twice[0]), fix="Write it into the grid"
        )
    return [one for entry in _entries(Path(axes.grid)) for one in _product(entry)]


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _product(axes: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Return every combination of the values, and check those that no method can take."""
    named = {_AXES.get(name, name): values for name, values in axes.items()}
    for method in named.get("method", []):
        METHODS.get(method)
    for bits in named.get("bits", []):
        if bits != AUTO and not str(bits).isdigit():
            raise ConfigError("Parameter 'bits' must be a whole number", allowed="whole numbers, auto", got=bits)
    return [dict(zip(named, values, strict=True)) for values in itertools.product(*named.values())]


def _own(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return a combination without the settings that its method does not have: it then takes part once."""
    if "method" not in asked:  # a served model: what the methods share is not for it
        default = CompressionConfig()
        return {**{name: getattr(default, name) for name in _SHARED}, **asked}
    settings = {field.name for field in fields(METHODS.get(asked["method"]).Config)}
    return {name: value for name, value in asked.items() if name not in ("bits", "group_size") or name in settings}


def _described(given: Mapping[str, Any]) -> str:
    """Return a combination in words, as in "hqq bits=5"."""
    rest = [f"{name}={value}" for name, value in given.items() if name != "method" and value != AUTO]
    return " ".join([given.get("method", SERVED_METHOD), *rest])


def _with_own_names(every: Iterable[Combination]) -> list[Combination]:
    """Return the variants under names that differ: where two have one name, the parameters that differ follow it."""
    listed = list(every)
    names = [one.name for one in listed]
    return [
        one if names.count(one.name) == 1 else _renamed(one, [o for o in listed if o.name == one.name])
        for one in listed
    ]


def _renamed(one: Combination, same: list[Combination]) -> Combination:
    others = [other.shown for other in same]
    differing = [f"{name}={value}" for name, value in one.shown.items() if any(o[name] != value for o in others)]
    return Combination(name=f"{one.name} ({', '.join(differing)})", config=one.config, settings=one.settings)


def _entries(file: Path) -> list[dict[str, list[Any]]]:
    """Return the entries of a grid file: a list of values per parameter.

    Raises
    ------
    ConfigError
        The file cannot be read, is no list of entries, or an entry has no method or a parameter that is no axis.
    """
    content = read_yaml(file, parameter="grid")
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise ConfigError(
            "The grid is no list of entries", allowed="entries such as '- {methods: [awq, gptq], bits: [4, 3]}'"
        )
    return [_entry(entry) for entry in content]


def _entry(entry: Mapping[str, Any]) -> dict[str, list[Any]]:
    allowed = (*_AXES, *_IN_GRID)
    if unknown := [name for name in entry if name not in allowed]:
        raise ConfigError("An entry of the grid has a parameter that is no axis", allowed=allowed, got=unknown[0])
    axes = {name: value if isinstance(value, list) else [value] for name, value in entry.items()}
    served = [is_endpoint(str(checkpoint)) for checkpoint in axes.get("checkpoint", [])]
    if any(served):
        if not all(served) or (unused := [name for name in entry if name not in _OF_SERVED]):
            got = dict(entry) if not all(served) else unused[0]
            raise ConfigError("An entry of the grid for served models has something else", allowed=_OF_SERVED, got=got)
    elif ("method" in entry) == ("methods" in entry):
        raise ConfigError("Every entry of the grid needs 'method' or 'methods'", got=dict(entry))
    if empty := [name for name, values in axes.items() if not values or None in values]:
        raise ConfigError("An axis of the grid has no values", got=empty[0])
    return axes
