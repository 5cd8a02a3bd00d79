"""The recipe of a checkpoint with several formats: a JSON file that says which layer gets which format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflow_compress import files as atomic
from mlflow_compress.compression.method import METHODS, MethodConfig, Setting, method_config
from mlflow_compress.config.declarations import AUTO
from mlflow_compress.errors import ConfigError
from mlflow_compress.files import read_typed

MIXED = "mixed"
"""The method that makes checkpoints of recipes."""
KEPT = "none"
"""Format of a layer that stays as it is."""


@dataclass(frozen=True, kw_only=True)
class LayerFormat:
    """A method with its settings, for some layers."""

    method: str
    config: MethodConfig


@dataclass(frozen=True, kw_only=True)
class MixedRecipe:
    """Which linear layer gets which format."""

    # Method and settings of each format: ``{"gptq:3": {"method": "gptq", "bits": 3}}``
    formats: dict[str, dict[str, Any]]
    # The format of every linear layer but the head, by the layer's name; "none" for a layer that stays as it is
    layers: dict[str, str]
    # Settings of `kv-cache` for the cache of each decoder layer, by its number: ``{"0": {"key_bits": 4}}``. A layer
    # that is not named keeps its cache as it is
    cache: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> MixedRecipe:
        """Return the recipe of a file. Broken files, and formats that are not described, are a `ConfigError`."""
        recipe = read_typed(path, cls, error=ConfigError, optional=("cache",))
        used = set(recipe.layers.values()) - {KEPT}
        if unknown := sorted(used - recipe.formats.keys()):
            raise ConfigError(
                f"{path.name} does not describe a format", allowed=[KEPT, *sorted(recipe.formats)], got=unknown[0]
            )
        return recipe

    def write(self, path: Path) -> None:
        atomic.write(path, self.text.encode())

    def written(self, folder: Path, name: str) -> Path:
        """Return its file below a folder, by name, in a folder of its content: it says which recipe it is."""
        path = folder / hashlib.sha256(self.text.encode()).hexdigest()[:12] / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write(path)
        return path

    @property
    def text(self) -> str:
        """The recipe as JSON; equal recipes have equal texts."""
        content = {"formats": self.formats, "layers": self.layers, **({"cache": self.cache} if self.cache else {})}
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    def parsed(self, shared: Mapping[str, Setting]) -> dict[str, LayerFormat]:
        """Return every format that a layer has, with checked settings; methods with calibration take the `shared`."""
        by_name = {}
        for name in sorted(set(self.layers.values()) - {KEPT}):
            settings = dict(self.formats[name])
            method = settings.pop("method", None)
            if not isinstance(method, str):
                raise ConfigError("A format of the recipe has no method", got=name)
            if METHODS.get(method).needs_calibration:
                settings |= shared
            by_name[name] = LayerFormat(method=method, config=method_config(method, **settings))
        return by_name

    def layers_of(self, name: str) -> list[str]:
        return [layer for layer, chosen in self.layers.items() if chosen == name]

    def require_layers(self, names: Iterable[str]) -> None:
        """Raise `ConfigError` unless the recipe names exactly these layers."""
        wanted = set(names)
        for wrong, what in ((wanted - self.layers.keys(), "lacks"), (self.layers.keys() - wanted, "has an unknown")):
            if wrong:
                raise ConfigError(f"The recipe {what} layer", allowed=f"{len(wanted)} layers", got=sorted(wrong)[0])


def format_parts(text: str) -> tuple[str, str]:
    """Return method and bits of a format as users write it; the bits are "auto" where they are not given.

    Examples
    --------
    >>> format_parts("gptq:3"), format_parts("fp8")
    (('gptq', '3'), ('fp8', 'auto'))
    """
    method, colon, bits = (part.strip() for part in text.partition(":"))
    if not method or (colon and not bits):
        raise ConfigError("A format must be METHOD:BITS", allowed="such as gptq:4, or fp8", got=text)
    return method, bits or AUTO
