"""Round to nearest: every weight is rounded to the nearest point of its group's grid."""

from mlflow_compress.compression.layers import ForLayers
from mlflow_compress.compression.method import GroupSize, MethodConfig, register


class _RoundToNearestConfig(MethodConfig):
    """Settings of `rtn`."""

    bits: int = 4  # Bits per weight
    group_size: GroupSize = 128
    symmetric: bool = True
    """Use a grid around zero, without zero point, instead of one between the group's minimum and maximum."""


@register
class RoundToNearest(ForLayers[_RoundToNearestConfig]):
    """Weight-only round-to-nearest quantization, without data."""

    name = "rtn"
    description = "Round to nearest, weight only: the simplest baseline for quantization"
    reference = "https://github.com/vllm-project/llm-compressor (QuantizationModifier)"
    format = "compressed-tensors (pack-quantized)"
    Config = _RoundToNearestConfig
    runs_in = ("vLLM (8 and 4 bit)",)
    supported_bits = (8, 4, 3, 2)
    from_disk = True
