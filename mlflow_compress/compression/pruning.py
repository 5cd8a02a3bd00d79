"""Base of the pruning methods: sparsity and its pattern, validated and named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mlflow_compress.compression.method import CalibratedConfig, CompressionJob, Method, MethodConfig, require_between
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models import stored_weights
from mlflow_compress.models.source_model import SourceModel

GROUP, ZEROS = 4, 2
"""Sizes of the 2:4 pattern: of every four neighbours in a row, two are zero."""


@dataclass(frozen=True, kw_only=True)
class PruningConfig(MethodConfig):
    """Settings of a method that sets weights to zero."""

    sparsity: float = 0.5
    """Share of zeros in each linear layer; head, embeddings and norms stay dense."""
    pattern: Literal["unstructured", "2:4"] = "unstructured"
    """Where zeros may be: anywhere, or exactly two in every four neighbours of a row."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a sparsity outside (0, 1), and for a 2:4 pattern with a sparsity other than 0.5."""
        require_between("sparsity", self.sparsity, 0.0, 1.0)
        if self.pattern == "2:4" and self.sparsity != ZEROS / GROUP:
            raise ConfigError("The pattern 2:4 has a fixed sparsity", allowed="0.5", got=self.sparsity)


@dataclass(frozen=True, kw_only=True)
class CalibratedPruningConfig(CalibratedConfig, PruningConfig):
    """Settings of a pruning method that needs calibration text."""

    def __post_init__(self) -> None:
        """Run the checks of both base classes."""
        CalibratedConfig.__post_init__(self)
        PruningConfig.__post_init__(self)


class PruningMethod(Method):
    """A method that sets weights to zero. The zeros are stored, so the files are as large as the base's."""

    format = "safetensors (dense)"
    runs_in = ("vLLM", "llama.cpp")

    def label(self, config: Any) -> str:
        """Return ``wanda-50pct`` or ``wanda-2of4``."""
        return f"{self.name}-{'2of4' if config.pattern == '2:4' else f'{100 * config.sparsity:g}pct'}"

    def check(self, config: Any, source: SourceModel) -> None:
        """Raise `UnsupportedError` for the 2:4 pattern where four does not divide a layer's input features."""
        if config.pattern == "2:4":
            for name, (_, in_features) in source.matrices.items():
                if in_features % GROUP:
                    raise UnsupportedError(
                        f"The pattern 2:4 does not fit the {in_features} input features of {name}",
                        allowed="multiples of 4",
                        got=config.pattern,
                        fix="Use pattern=unstructured",
                    )


def require_pruned(job: CompressionJob) -> None:
    """Raise `UnsupportedError` naming the first linear layer with fewer zeros than the settings ask for.

    A backend silently skips a layer that it does not reach when it traces the model.
    """
    matrices = job.source.stored_matrices
    counts = stored_weights.zeros_of_layers(job.folder, matrices)
    for name, (_, in_features) in matrices.items():
        found = counts.get(name)
        zeros = None if found is None else found[0] / found[1]
        if (
            zeros is None or zeros < job.config.sparsity - 1 / in_features
        ):  # the backend rounds to a number of columns per row
            raise UnsupportedError(f"The layer {name} was not pruned", allowed=f"{job.config.sparsity}", got=zeros)


def modifier_options(job: CompressionJob) -> dict[str, Any]:
    """Return the common options of llm-compressor's pruning modifiers.

    All layers are listed by name. The option ``ignore`` cannot exclude the head, because it compares "lm_head." with
    "lm_head", and the head would be pruned too.
    """
    config = job.config
    return {
        "sparsity": config.sparsity,
        "mask_structure": "2:4" if config.pattern == "2:4" else "0:0",
        "targets": list(job.source.matrices),
    }
