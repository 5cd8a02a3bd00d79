"""LLM.int8(): 8-bit weights and activations; outlier columns are computed in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlflow_compress.compression.backends.bitsandbytes_backend import quantize_and_save
from mlflow_compress.compression.method import CompressionJob, Method, MethodConfig, register, require_bits
from mlflow_compress.errors import ConfigError

if TYPE_CHECKING:
    import torch

BITS = (8,)


@dataclass(frozen=True, kw_only=True)
class BnbInt8Config(MethodConfig):
    """Settings of `bnb-int8`."""

    bits: int = 8
    """Bits per weight: always 8."""
    threshold: float = 6.0
    """Input columns with a value above this are computed in 16 bits."""

    def __post_init__(self) -> None:
        """Raise an error for other bits and a negative threshold."""
        require_bits("bnb-int8", self.bits, BITS)
        if self.threshold < 0:
            raise ConfigError("threshold is negative", allowed="0 or more", got=self.threshold)


@register
class BnbInt8(Method):
    """bitsandbytes 8-bit: one scale per row of weights, and one per row of activations."""

    name = "bnb-int8"
    description = "bitsandbytes LLM.int8(): 8-bit weights and activations, outliers in 16 bits"
    reference = "Dettmers et al. 2022, https://arxiv.org/abs/2208.07339"
    format = "bitsandbytes 8-bit"
    Config = BnbInt8Config
    runs_in = ("vLLM",)
    supported_bits = BITS
    by_class = True
    requires = ("bitsandbytes", "accelerate")

    def compress(self, job: CompressionJob) -> torch.Tensor:
        """Quantize while loading."""
        return quantize_and_save(job, load_in_8bit=True, llm_int8_threshold=job.config.threshold)
