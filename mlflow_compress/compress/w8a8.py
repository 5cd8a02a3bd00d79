"""W8A8: 8-bit integers for weights and activations, rounded to nearest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlflow_compress.compress import llmcompressor_backend as backend
from mlflow_compress.compress.base import Job, Method, MethodConfig, register, require_bits

if TYPE_CHECKING:
    import torch

BITS = (8,)


@dataclass(frozen=True, kw_only=True)
class Config(MethodConfig):
    """Settings of `w8a8`."""

    bits: int = 8
    """Bits of a weight and of an activation: always 8."""

    def __post_init__(self) -> None:
        """Refuse other bits."""
        require_bits("w8a8", self.bits, BITS)


@register
class W8A8(Method):
    """Round-to-nearest weights (one scale a row) and activations (one scale a token, found at run time)."""

    name = "w8a8"
    description = "8-bit integer weights and activations, rounded to nearest: the baseline of smoothquant"
    reference = "https://github.com/vllm-project/llm-compressor (QuantizationModifier, scheme W8A8)"
    format = "compressed-tensors (int-quantized)"
    Config = Config
    runs_in = ("vLLM",)
    supported_bits = BITS
    requires = ("llmcompressor",)

    def compress(self, job: Job) -> torch.Tensor:
        """Quantize without data: the activations' scales are found anew for every token."""

        def recipe() -> list[object]:
            from llmcompressor.modifiers.quantization import QuantizationModifier

            return [QuantizationModifier(config_groups=backend.activation_scheme("int"), ignore=job.source.ignored)]

        return backend.run_oneshot(job, recipe)
