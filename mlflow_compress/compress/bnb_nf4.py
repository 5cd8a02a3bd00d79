"""NF4: 4-bit codes at the quantiles of a normal distribution, in blocks of 64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlflow_compress.compress.base import Job, Method, MethodConfig, register, require_bits
from mlflow_compress.compress.bitsandbytes_backend import quantize_and_save

if TYPE_CHECKING:
    import torch

BITS = (4,)


@dataclass(frozen=True, kw_only=True)
class Config(MethodConfig):
    """Settings of `bnb-nf4`."""

    bits: int = 4
    """Bits of a weight: always 4."""
    double_quant: bool = False
    """Quantize the blocks' scales to 8 bits as well."""

    def __post_init__(self) -> None:
        """Refuse other bits."""
        require_bits("bnb-nf4", self.bits, BITS)


@register
class BnbNf4(Method):
    """bitsandbytes 4-bit NormalFloat."""

    name = "bnb-nf4"
    description = "bitsandbytes NF4: 4-bit normal-float weights in blocks of 64 (the format of QLoRA)"
    reference = "Dettmers et al. 2023, https://arxiv.org/abs/2305.14314"
    format = "bitsandbytes 4-bit (nf4)"
    Config = Config
    runs_in = ("vLLM",)
    supported_bits = BITS
    requires = ("bitsandbytes", "accelerate")

    def compress(self, job: Job) -> torch.Tensor:
        """Quantize while loading."""
        return quantize_and_save(
            job,
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=job.config.double_quant,
        )
