"""fp8: 8-bit floating point (e4m3) for weights and activations."""

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
    """Settings of `fp8`."""

    bits: int = 8
    """Bits of a weight and of an activation: always 8."""

    def __post_init__(self) -> None:
        """Refuse other bits."""
        require_bits("fp8", self.bits, BITS)


@register
class Fp8(Method):
    """e4m3 weights (one scale a row) and activations (one scale a token, found at run time).

    A processor without float8 arithmetic evaluates it by rounding to the float8 grid and multiplying in float32.
    """

    name = "fp8"
    description = "8-bit floating-point (e4m3) weights and activations"
    reference = "Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433 (llm-compressor, scheme FP8_DYNAMIC)"
    format = "compressed-tensors (float-quantized)"
    Config = Config
    runs_in = ("vLLM",)
    supported_bits = BITS
    requires = ("llmcompressor",)

    def compress(self, job: Job) -> torch.Tensor:
        """Quantize without data: the activations' scales are found anew for every token."""

        def recipe() -> list[object]:
            from llmcompressor.modifiers.quantization import QuantizationModifier

            return [QuantizationModifier(config_groups=backend.activation_scheme("float"), ignore=job.source.ignored)]

        return backend.run_oneshot(job, recipe)
