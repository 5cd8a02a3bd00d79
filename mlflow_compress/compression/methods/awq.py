"""AWQ: scales important input channels up before rounding, and scales the outputs of the layer before down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mlflow_compress.compression.backends import gptqmodel_backend
from mlflow_compress.compression.backends import llmcompressor_backend as backend
from mlflow_compress.compression.layers import ForLayers
from mlflow_compress.compression.method import (
    CalibratedConfig,
    CompressionJob,
    register,
    require_at_least,
    require_bits,
)
from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models.source_model import SourceModel

if TYPE_CHECKING:
    import torch

BITS = (8, 4, 3)
AS = {"MixtralForCausalLM": "Qwen3MoeForCausalLM"}
"""Architectures that llm-compressor has no mappings for, and those with the same layers whose mappings they take."""


@dataclass(frozen=True, kw_only=True)
class AwqConfig(CalibratedConfig):
    """Settings of `awq`."""

    bits: int = 4
    """Bits per weight."""
    group_size: int | Literal["channel"] = 128
    """Number of neighbouring weights of a row that share a scale; "channel": one scale per row."""
    symmetric: bool = False
    """Use a grid around zero, without zero point. The paper's grid is between the group's minimum and maximum."""
    duo_scaling: bool = True
    """Compute the scales from the magnitudes of weights and activations, not of activations only."""
    grid: int = 20
    """Number of exponents between 0 and 1 that are tried for each layer's scales."""
    calibration_samples: int = 32
    """Number of calibration sequences; each block runs on all of them once per exponent."""
    backend: Literal["llmcompressor", "gptqmodel"] = "llmcompressor"
    """Library that compresses; gptqmodel also clips, and writes AutoAWQ's format (GEMM)."""

    def __post_init__(self) -> None:
        """Raise an error for bits, group sizes and grids that do not exist."""
        super().__post_init__()
        require_bits("awq", self.bits, BITS)
        if not isinstance(self.group_size, str):
            require_at_least("group_size", self.group_size, 1)
        require_at_least("grid", self.grid, 2)
        if self.backend == gptqmodel_backend.NAME:
            self._require_gptqmodel()

    def _require_gptqmodel(self) -> None:
        if self.bits == 8:
            raise UnsupportedError(
                "gptqmodel's 8-bit AWQ is wrong: the file does not compute what was quantized",
                allowed="4, 3",
                got=self.bits,
                fix="Use backend=llmcompressor",
            )
        fixed = {"symmetric": False, "duo_scaling": True, "grid": 20}
        for name, value in fixed.items():
            if getattr(self, name) != value:
                raise UnsupportedError(
                    f"gptqmodel's AWQ has no setting {name}", allowed=str(value).lower(), got=getattr(self, name)
                )


@register
class Awq(ForLayers, gptqmodel_backend.TwoBackendMethod):
    """Activation-aware weight-only quantization."""

    name = "awq"
    description = "AWQ, weight only: protects the channels with large activations by rescaling"
    reference = "Lin et al. 2024, https://arxiv.org/abs/2306.00978 (llm-compressor AWQModifier)"
    format = "compressed-tensors (pack-quantized)"
    Config = AwqConfig
    runs_in = ("vLLM (8 and 4 bit)",)
    supported_bits = BITS
    by_class = True
    needs_calibration = True
    requires = ("llmcompressor",)
    other_format = "awq (gemm)"
    rescales = True

    def quantize_config(self, config: Any) -> dict[str, Any]:
        """Return AutoAWQ's settings."""
        return {**super().quantize_config(config), "quant_method": "awq", "format": "gemm", "sym": False}

    def check_llmcompressor(self, source: SourceModel) -> None:
        """Raise `UnsupportedError` for an architecture without known scaling pairs."""
        backend.load_for_llmcompressor()
        from llmcompressor.modifiers.transform.awq import AWQ_MAPPING_REGISTRY
        from llmcompressor.modifiers.transform.awq.dynamic_mappings import AWQ_DYNAMIC_MAPPING_REGISTRY

        backend.require_known(
            source,
            (*AWQ_MAPPING_REGISTRY, *AWQ_DYNAMIC_MAPPING_REGISTRY, *AS),
            unknown="AWQ does not know which layers of this architecture to scale together",
            instead="gptq or rtn",
        )

    def modifiers(
        self, config: Any, source: SourceModel, schemes: Mapping[str, dict[str, Any]], ignored: Sequence[str]
    ) -> list[object]:
        """Return the modifier that rescales, and the one that rounds."""
        from llmcompressor.modifiers.transform.awq import AWQ_MAPPING_REGISTRY, AWQModifier

        mappings = AWQ_MAPPING_REGISTRY[AS[source.architecture]] if source.architecture in AS else None
        scales = AWQModifier(duo_scaling=config.duo_scaling, n_grid=config.grid, mappings=mappings)
        return [scales, *super().modifiers(config, source, schemes, ignored)]

    def guarded(self) -> AbstractContextManager[object]:
        """Keep cached activations out of page-locked memory."""
        backend.load_for_llmcompressor()
        return backend.unpinned_cache()

    def run_llmcompressor(self, job: CompressionJob) -> torch.Tensor:
        """Search the scales of each layer on the calibration set, then round."""
        return self.compress_all(job)
