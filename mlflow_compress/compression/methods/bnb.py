"""NF4: 4-bit codes at the quantiles of a normal distribution, in blocks of 64."""

from __future__ import annotations

from mlflow_compress.compression.backends.bitsandbytes_backend import FourBitConfig, FourBitMethod
from mlflow_compress.compression.method import register


class BnbFp4Config(FourBitConfig):
    """Settings of `bnb-fp4`."""

    codes = "fp4"


@register
class BnbFp4(FourBitMethod):
    """bitsandbytes 4-bit floating point."""

    name = "bnb-fp4"
    description = "bitsandbytes FP4: 4-bit floating-point weights in blocks of 64"
    reference = "Dettmers and Zettlemoyer 2023, https://arxiv.org/abs/2212.09720"
    format = "bitsandbytes 4-bit (fp4)"
    Config = BnbFp4Config


class BnbNf4Config(FourBitConfig):
    """Settings of `bnb-nf4`."""

    codes = "nf4"


@register
class BnbNf4(FourBitMethod):
    """bitsandbytes 4-bit NormalFloat."""

    name = "bnb-nf4"
    description = "bitsandbytes NF4: 4-bit normal-float weights in blocks of 64 (the format of QLoRA)"
    reference = "Dettmers et al. 2023, https://arxiv.org/abs/2305.14314"
    format = "bitsandbytes 4-bit (nf4)"
    Config = BnbNf4Config
