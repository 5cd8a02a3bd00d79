"""Base of methods that round weights and activations to 8 bits without calibration."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from mlflow_compress.compression.backends import llmcompressor_backend as backend
from mlflow_compress.compression.layers import ForLayers
from mlflow_compress.compression.method import MethodConfig, register


class _EightBitConfig(MethodConfig):
    """Settings of a method with 8-bit weights and activations."""

    bits: int = 8  # Bits per weight and per activation: always 8


class _EightBitMethod(ForLayers[_EightBitConfig]):
    """A method with one scale per row of weights, and one scale per token of activations, computed at run time."""

    Config = _EightBitConfig
    grid: ClassVar[Literal["int", "float"]]
    runs_in = ("vLLM",)
    supported_bits = (8,)
    rounds_activations = True

    def scheme(self, config: Any, targets: Sequence[str]) -> dict[str, Any]:
        return backend.activation_scheme(self.grid, targets)


@register
class Fp8(_EightBitMethod):
    """e4m3 weights (one scale per row) and activations (one scale per token, computed at run time).

    On a processor without float8 arithmetic, values are rounded to the float8 grid and multiplied in float32.
    """

    name = "fp8"
    description = "8-bit floating-point (e4m3) weights and activations"
    reference = "Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433 (llm-compressor, scheme FP8_DYNAMIC)"
    format = "compressed-tensors (float-quantized)"
    grid = "float"
    from_disk = True


@register
class W8A8(_EightBitMethod):
    """Round-to-nearest weights (one scale per row) and activations (one scale per token, computed at run time)."""

    name = "w8a8"
    description = "8-bit integer weights and activations, rounded to nearest: the baseline for smoothquant"
    reference = "https://github.com/vllm-project/llm-compressor (QuantizationModifier, scheme W8A8)"
    format = "compressed-tensors (int-quantized)"
    grid = "int"
    from_disk = True
