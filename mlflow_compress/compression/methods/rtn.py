"""Round to nearest: every weight is rounded to the nearest point of its group's grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mlflow_compress.compression.layers import ForLayers
from mlflow_compress.compression.method import (
    CompressionJob,
    Method,
    MethodConfig,
    register,
    require_at_least,
    require_bits,
)
from mlflow_compress.models.source_model import SourceModel

if TYPE_CHECKING:
    import torch

BITS = (8, 4, 3, 2)


@dataclass(frozen=True, kw_only=True)
class RoundToNearestConfig(MethodConfig):
    """Settings of `rtn`."""

    bits: int = 4
    """Bits per weight."""
    group_size: int | Literal["channel"] = 128
    """Number of neighbouring weights of a row that share a scale; "channel": one scale per row."""
    symmetric: bool = True
    """Use a grid around zero, without zero point, instead of one between the group's minimum and maximum."""

    def __post_init__(self) -> None:
        """Raise an error for bits and group sizes that do not exist."""
        require_bits("rtn", self.bits, BITS)
        if not isinstance(self.group_size, str):
            require_at_least("group_size", self.group_size, 1)


@register
class RoundToNearest(ForLayers, Method):
    """Weight-only round-to-nearest quantization, without data."""

    name = "rtn"
    description = "Round to nearest, weight only: the plain baseline of quantization"
    reference = "https://github.com/vllm-project/llm-compressor (QuantizationModifier)"
    format = "compressed-tensors (pack-quantized)"
    Config = RoundToNearestConfig
    runs_in = ("vLLM (8 and 4 bit)",)
    supported_bits = BITS
    by_class = True
    from_disk = True
    requires = ("llmcompressor",)

    def takes_experts(self, config: Any) -> bool:
        """Return True."""
        return True

    def check(self, config: Any, source: SourceModel) -> None:
        """Raise `UnsupportedError` for a group size that does not divide a layer."""
        source.require_group_size(config.group_size)

    def compress(self, job: CompressionJob) -> torch.Tensor:
        """Quantize without data."""
        return self.compress_all(job)
