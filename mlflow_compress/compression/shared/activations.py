"""What methods share that round weights and activations to 8 bits without looking at data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from mlflow_compress.compression.backends import llmcompressor_backend as backend
from mlflow_compress.compression.method import CompressionJob, Method, MethodConfig, require_bits

if TYPE_CHECKING:
    import torch

BITS = (8,)


@dataclass(frozen=True, kw_only=True)
class EightBitConfig(MethodConfig):
    """Settings of a method whose weights and activations have 8 bits."""

    method: ClassVar[str]
    bits: int = 8
    """Bits of a weight and of an activation: always 8."""

    def __post_init__(self) -> None:
        """Refuse other bits."""
        require_bits(self.method, self.bits, BITS)


class EightBitMethod(Method):
    """One scale a row of weights; one a token for activations, found at run time."""

    grid: ClassVar[Literal["int", "float"]]
    runs_in = ("vLLM",)
    supported_bits = BITS
    by_class = True
    rounds_activations = True
    requires = ("llmcompressor",)

    def compress(self, job: CompressionJob) -> torch.Tensor:
        """Quantize without data: the activations' scales are found anew for every token."""

        def recipe() -> list[object]:
            from llmcompressor.modifiers.quantization import QuantizationModifier

            return [QuantizationModifier(config_groups=backend.activation_scheme(self.grid), ignore=job.source.ignored)]

        return backend.run_oneshot(job, recipe)
