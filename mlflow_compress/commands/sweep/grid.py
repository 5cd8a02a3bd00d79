"""What a sweep asks for: the combinations of its axes, or those of a grid file. Reads no model and imports no torch."""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlflow_compress.commands.sweep.parameters import SweepConfig
from mlflow_compress.compression.method import METHODS
from mlflow_compress.config import CompressionConfig, is_endpoint
from mlflow_compress.config.declarations import AUTO
from mlflow_compress.errors import ConfigError
from mlflow_compress.files import read_yaml

_AXES = {"methods": "method"}  # a name that is clearer with several values
_OF_SERVED = ("checkpoint", "served_model", "tokenizer")
_IN_GRID = (*(name for name in CompressionConfig.model_fields if name != "output_dir"), *_OF_SERVED[1:])
_GIVEN = ("methods", "bits", "group_size")


def asked_for(config: SweepConfig) -> Iterable[dict[str, str]]:
    """Return every combination by its parameters. A wrong name, or a grid that cannot be read, is a `ConfigError`."""
    axes = config.variants
    if axes.grid is None:
        split = {name: getattr(axes, name).split(",") for name in _GIVEN}
        return _product({name: [part.strip() for part in parts if part.strip()] for name, parts in split.items()})
    default = SweepConfig().variants
    if twice := [name for name in _GIVEN if getattr(axes, name) != getattr(default, name)]:
        raise ConfigError(
            f"Parameter '{twice[0]}' conflicts with a grid", got=getattr(axes, twice[0]), fix="Write it into the grid"
        )
    content = read_yaml(Path(axes.grid), parameter="grid")
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise ConfigError(
            "The grid is no list of entries", allowed="entries such as '- {methods: [awq, gptq], bits: [4, 3]}'"
        )
    entries = [_entry(entry) for entry in content]
    return [one for entry in entries for one in _product(entry)]


def _product(axes: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    named = {_AXES.get(name, name): values for name, values in axes.items()}
    for method in named.get("method", []):
        METHODS.get(method)
    for bits in named.get("bits", []):
        if bits != AUTO and not str(bits).isdigit():
            raise ConfigError("Parameter 'bits' must be a whole number", allowed="whole numbers, auto", got=bits)
    return [dict(zip(named, values, strict=True)) for values in itertools.product(*named.values())]


def _entry(entry: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return an entry of a grid file: a list of values per parameter."""
    allowed = (*_AXES, *_IN_GRID)
    if unknown := [name for name in entry if name not in allowed]:
        raise ConfigError("A grid entry has a parameter that is not an axis", allowed=allowed, got=unknown[0])
    axes = {name: value if isinstance(value, list) else [value] for name, value in entry.items()}
    served = [is_endpoint(str(checkpoint)) for checkpoint in axes.get("checkpoint", [])]
    if any(served):
        if not all(served) or (unused := [name for name in entry if name not in _OF_SERVED]):
            got = dict(entry) if not all(served) else unused[0]
            raise ConfigError("A grid entry for served models has another parameter", allowed=_OF_SERVED, got=got)
    elif ("method" in entry) == ("methods" in entry):
        raise ConfigError("Every entry of the grid needs 'method' or 'methods'", got=dict(entry))
    if empty := [name for name, values in axes.items() if not values or None in values]:
        raise ConfigError("An axis of the grid has no values", got=empty[0])
    return axes
