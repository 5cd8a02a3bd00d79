"""What a search chooses from: formats, limits, and recipes as variants that the main job can make."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mlflow_compress.commands.quantize.run import method_settings, variant_name
from mlflow_compress.commands.search.parameters import LIMITS, SearchConfig
from mlflow_compress.commands.sweep.plan import Combination
from mlflow_compress.compression.layers import ForLayers
from mlflow_compress.compression.method import METHODS, CalibratedConfig
from mlflow_compress.compression.mixed_recipe import KEPT, MixedRecipe, format_parts
from mlflow_compress.decide.cost_table import Limit, StoredSizes
from mlflow_compress.errors import ConfigError
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.models.stored_weights import bytes_of_layers, read_headers, total_bytes

MIXED = "mixed"


@dataclass(frozen=True, kw_only=True)
class CandidateFormat:
    """A format that a group of layers may get."""

    name: str  # As the user wrote it: "gptq:4"
    method: str  # Its method
    uniform: Combination  # The variant in which all layers have this format

    @property
    def described(self) -> dict[str, Any]:
        """Method and settings for a recipe, which has the settings of the calibration by itself."""
        own = self.uniform.own_settings.items()
        return {"method": self.method, **{k: v for k, v in own if k not in CalibratedConfig.model_fields}}

    @property
    def rescales(self) -> bool:
        """Whether its method moves scales between neighbouring layers, which then get one format together."""
        method = METHODS.get(self.method)
        return isinstance(method, ForLayers) and method.rescales

    @property
    def calibration_samples(self) -> int:
        """Calibration sequences that its method reads; 0 where it needs none."""
        return int(getattr(self.uniform.settings, "calibration_samples", 0))


def candidates(config: SearchConfig) -> tuple[list[CandidateFormat], bool]:
    """Return the formats, and whether a layer may stay as it is.

    Raises
    ------
    ConfigError
        A format is unknown or there twice, or there are fewer than two.
    """
    asked = [part.strip() for part in config.space.formats.split(",") if part.strip()]
    if len(set(asked)) < max(2, len(asked)):
        raise ConfigError("A search needs two different formats or more", got=config.space.formats)
    found = [_candidate(config, name) for name in asked if name != KEPT]
    return found, KEPT in asked


def _candidate(config: SearchConfig, name: str) -> CandidateFormat:
    method, bits = format_parts(name)
    known = METHODS.get(method).Config.model_fields
    given: dict[str, Any] = {"bits": bits, "group_size": config.space.group_size}
    own = METHODS.get(method).for_single_layers
    if own:
        given["method_args"] = {**own, **config.space.method_args}
    variant = config.main_config(method=method, **{k: v for k, v in given.items() if k in known or k == "method_args"})
    settings = method_settings(variant.quantize_config)
    METHODS.get(method).require_backend(settings)
    uniform = Combination(name=variant_name(variant.quantize_config), config=variant, settings=settings)
    return CandidateFormat(name=name, method=method, uniform=uniform)


def limits_of(config: SearchConfig) -> list[Limit]:
    """Return the limits, one variant each. None, or those of two kinds, are a `ConfigError`."""
    given = [name for name in LIMITS if getattr(config.space, name) is not None]
    if len(given) != 1:
        raise ConfigError("A search needs one kind of limit", allowed=LIMITS, got=", ".join(given) or "none")
    values = sorted({float(part) for part in getattr(config.space, given[0]).split(",")})
    return [Limit(kind=given[0], value=value) for value in values]  # type: ignore[arg-type]


def recipe_variant(
    config: SearchConfig, found: Sequence[CandidateFormat], layers: Mapping[str, str], name: str, folder: Path
) -> Combination:
    """Return the variant of a recipe, which is written into `folder`."""
    used = [one for one in found if one.name in set(layers.values())]
    recipe = MixedRecipe(formats={one.name: one.described for one in used}, layers=dict(layers))
    digest = hashlib.sha256(recipe.text.encode()).hexdigest()[:12]
    path = folder / digest / f"{'-'.join(sorted({one.method for one in used}))}-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    recipe.write(path)
    samples = max([1, *(one.calibration_samples for one in used)])  # 1 where no format reads them
    variant = config.main_config(method=MIXED, method_args={"recipe": str(path)}, calibration_samples=samples)
    settings = method_settings(variant.quantize_config)
    return Combination(name=variant_name(variant.quantize_config), config=variant, settings=settings)


def require_mixable(config: SearchConfig, found: Sequence[CandidateFormat], source: SourceModel) -> None:
    """Raise an error, before any work, where the formats cannot share a checkpoint."""
    layers = {layer: found[i % len(found)].name for i, layer in enumerate(source.linear)}
    with TemporaryDirectory() as folder:
        settings: Any = recipe_variant(config, found, layers, "check", Path(folder)).settings
        METHODS.get(MIXED).check(settings, source)


def require_in_reach(limit: Limit, found: Sequence[CandidateFormat], source: SourceModel) -> None:
    """Raise `ConfigError`, before any work, for a budget that no format reaches or that is above the baseline's.

    Scales and zero points are not known yet: the budget is checked again when the formats' checkpoints are there.
    """
    headers = read_headers(source.folder)
    weights = sum(rows * columns for rows, columns in source.linear.values())
    base = bytes_of_layers(headers, source.linear)
    fewest = min(int(one.uniform.own_settings["bits"]) for one in found)
    sizes = StoredSizes(
        groups=("all",),
        formats=("smallest",),
        layers=np.array([[fewest * weights // 8]]),
        base=base,
        rest=total_bytes(headers) - base,
        weights=weights,
    )
    if limit.kind != "max_kl":
        limit.layer_bytes(sizes, scales=False)
