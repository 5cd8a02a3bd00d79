"""AWQ: scales important input channels up before rounding, and scales the outputs of the layer before down."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from pydantic import Field, model_validator

from mlflow_compress.compression.backends import gptqmodel_backend
from mlflow_compress.compression.backends import llmcompressor_backend as backend
from mlflow_compress.compression.method import register
from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models.source_model import SourceModel

AS = {"MixtralForCausalLM": "Qwen3MoeForCausalLM"}
"""Architectures that llm-compressor has no mappings for, and those with the same layers whose mappings they take."""


class _AwqConfig(gptqmodel_backend.TwoBackendConfig):
    """Settings of `awq`."""

    symmetric: bool = False
    """Use a grid around zero, without zero point. The paper's grid is between the group's minimum and maximum."""
    duo_scaling: bool = True
    """Compute the scales from the magnitudes of weights and activations, not of activations only."""
    grid: int = Field(20, ge=2)  # Number of exponents between 0 and 1 that are tried for each layer's scales
    calibration_samples: int = Field(32, ge=1)
    """Number of calibration sequences; each block runs on all of them once per exponent."""

    @model_validator(mode="after")
    def _require_supported(self) -> Self:
        if self.backend != gptqmodel_backend.BACKEND_NAME:
            return self
        if self.bits == 8:
            raise UnsupportedError(
                "gptqmodel's 8-bit AWQ is wrong: the saved file does not reproduce the quantized model",
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
        return self


@register
class Awq(gptqmodel_backend.TwoBackendMethod[_AwqConfig]):
    """Activation-aware weight-only quantization."""

    name = "awq"
    description = "AWQ, weight only: protects the channels with large activations by rescaling"
    reference = "Lin et al. 2024, https://arxiv.org/abs/2306.00978 (llm-compressor AWQModifier)"
    format = "compressed-tensors (pack-quantized)"
    Config = _AwqConfig
    runs_in = ("vLLM (8 and 4 bit)",)
    supported_bits = (8, 4, 3)
    needs_calibration = True
    other_format = "awq (gemm)"
    rescales = True

    def quantize_config(self, config: _AwqConfig) -> dict[str, Any]:
        return {**super().quantize_config(config), "quant_method": "awq", "format": "gemm", "sym": False}

    def check_llmcompressor(self, source: SourceModel) -> None:
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
        self, config: _AwqConfig, source: SourceModel, schemes: Mapping[str, dict[str, Any]], ignored: Sequence[str]
    ) -> list[object]:
        from llmcompressor.modifiers.transform.awq import AWQ_MAPPING_REGISTRY, AWQModifier

        mappings = AWQ_MAPPING_REGISTRY[AS[source.architecture]] if source.architecture in AS else None
        scales = AWQModifier(duo_scaling=config.duo_scaling, n_grid=config.grid, mappings=mappings)
        return [scales, *super().modifiers(config, source, schemes, ignored)]

    def guarded(self) -> AbstractContextManager[object]:
        backend.load_for_llmcompressor()
        return backend.unpinned_cache()
