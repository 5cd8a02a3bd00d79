"""Base of methods that round weights and activations to 8 bits without calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mlflow_compress.compression.backends import llmcompressor_backend as backend
from mlflow_compress.compression.method import CompressionJob, Method, MethodConfig, require_bits
from mlflow_compress.compression.shared.for_layers import ForLayers

if TYPE_CHECKING:
    import torch

BITS = (8,)


@dataclass(frozen=True, kw_only=True)
class EightBitConfig(MethodConfig):
    """Settings of a method with 8-bit weights and activations."""

    method: ClassVar[str]
    bits: int = 8
    """Bits per weight and per activation: always 8."""

    def __post_init__(self) -> None:
        """Refuse other bits."""
        require_bits(self.method, self.bits, BITS)


class EightBitMethod(ForLayers, Method):
    """A method with one scale per row of weights, and one scale per token of activations, computed at run time."""

    grid: ClassVar[Literal["int", "float"]]
    runs_in = ("vLLM",)
    supported_bits = BITS
    by_class = True
    rounds_activations = True
    requires = ("llmcompressor",)

    def takes_experts(self, config: Any) -> bool:
        """Return True."""
        return True

    def scheme(self, config: Any, targets: Sequence[str]) -> dict[str, Any]:
        """Return the config group of 8-bit weights and activations."""
        return backend.activation_scheme(self.grid, targets)

    def compress(self, job: CompressionJob) -> torch.Tensor:
        """Quantize without data: the scale of the activations is computed for every token."""
        return self.compress_all(job)
