"""W8A8: 8-bit integers for weights and activations, rounded to nearest."""

from __future__ import annotations

from dataclasses import dataclass

from mlflow_compress.compression.method import register
from mlflow_compress.compression.shared.activations import EightBitConfig, EightBitMethod


@dataclass(frozen=True, kw_only=True)
class W8A8Config(EightBitConfig):
    """Settings of `w8a8`."""

    method = "w8a8"


@register
class W8A8(EightBitMethod):
    """Round-to-nearest weights (one scale per row) and activations (one scale per token, computed at run time)."""

    name = "w8a8"
    description = "8-bit integer weights and activations, rounded to nearest: the baseline of smoothquant"
    reference = "https://github.com/vllm-project/llm-compressor (QuantizationModifier, scheme W8A8)"
    format = "compressed-tensors (int-quantized)"
    grid = "int"
    Config = W8A8Config
