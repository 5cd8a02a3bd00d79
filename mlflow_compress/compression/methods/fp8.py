"""fp8: 8-bit floating point (e4m3) for weights and activations."""

from __future__ import annotations

from dataclasses import dataclass

from mlflow_compress.compression.method import register
from mlflow_compress.compression.shared.activations import EightBitConfig, EightBitMethod


@dataclass(frozen=True, kw_only=True)
class Fp8Config(EightBitConfig):
    """Settings of `fp8`."""

    method = "fp8"


@register
class Fp8(EightBitMethod):
    """e4m3 weights (one scale per row) and activations (one scale per token, computed at run time).

    On a processor without float8 arithmetic, values are rounded to the float8 grid and multiplied in float32.
    """

    name = "fp8"
    description = "8-bit floating-point (e4m3) weights and activations"
    reference = "Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433 (llm-compressor, scheme FP8_DYNAMIC)"
    format = "compressed-tensors (float-quantized)"
    grid = "float"
    Config = Fp8Config
