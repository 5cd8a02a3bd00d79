"""KV-cache quantization at evaluation time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from mlflow_compress.compression.layers import save_and_measure
from mlflow_compress.compression.method import CompressionJob, Method, MethodConfig, register
from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models.architectures import QUANTIZED_CACHE
from mlflow_compress.models.source_model import SourceModel

if TYPE_CHECKING:
    import torch

BITS = (8, 4, 3, 2)


class KvCacheConfig(MethodConfig):
    """Settings of `kv-cache`."""

    cache_bits: int = 4  # Bits per number in the cache
    cache_group: Annotated[int, Field(ge=1)] | Literal["head"] = "head"
    """Number of neighbours in a head's vector that share a scale and an offset; "head": one of each per vector."""

    @model_validator(mode="after")
    def _require_bits(self) -> Self:
        if self.cache_bits not in BITS:
            raise UnsupportedError(
                "Method 'kv-cache' does not support these cache_bits", allowed=map(str, BITS), got=self.cache_bits
            )
        return self


@register
class KvCache(Method[KvCacheConfig]):
    """The base model, whose attention reads every key and value rounded to an asymmetric grid, token by token.

    The model of the cache: each head's vector of each token is rounded separately, keys after their rotation, and every
    token is read from the cache, including the present one. So a text is scored as if it were decoded token by token.
    Servers differ. vLLM's fp8 cache has a floating-point grid. KIVI rounds keys by channel over groups of tokens. KIVI
    and transformers' `QuantizedCache` do not round the latest tokens, nor a prompt while it is read. Scales and offsets
    are not rounded here. The weights are the base's, so the checkpoint is as large; a server saves memory.
    """

    name = "kv-cache"
    description = "Keys and values rounded at evaluation time: what a quantized cache costs; the weights stay"
    reference = "Liu et al. 2024 (KIVI), https://arxiv.org/abs/2402.02750, with keys by token"
    format = "safetensors (quantized_cache)"
    own_format = True
    Config = KvCacheConfig
    compresses = False
    linear_only = False

    def label(self, config: KvCacheConfig) -> str:
        """Return ``kv-cache-4bit-head``."""
        group = config.cache_group
        return f"{self.name}-{config.cache_bits}bit-{group if isinstance(group, str) else f'g{group}'}"

    def check(self, config: KvCacheConfig, source: SourceModel) -> None:
        model = source.configuration().get_text_config()
        if getattr(model, "attn_logit_softcapping", None):
            raise UnsupportedError(
                "Keys and values cannot be rounded in soft-capped attention", got=source.architecture
            )
        width = head_dim(model)
        if not isinstance(config.cache_group, str) and width % config.cache_group:
            raise UnsupportedError(
                "cache_group does not divide the width of an attention head",
                allowed=f"a divisor of {width}, or 'head'",
                got=config.cache_group,
            )

    def compress(self, job: CompressionJob[KvCacheConfig]) -> torch.Tensor:
        from mlflow_compress.models.architectures.own_formats import OwnFormatConfig, quantize_cache

        model, config = job.source.load(job.device), job.config
        group = config.cache_group
        width = head_dim(model.config.get_text_config()) if isinstance(group, str) else group
        settings = OwnFormatConfig(QUANTIZED_CACHE, cache_bits=config.cache_bits, cache_group=width)
        model.config.quantization_config = settings.to_dict()
        quantize_cache(model, config.cache_bits, width)
        return save_and_measure(job, model)


def head_dim(config: Any) -> int:
    """Return the width of an attention head's keys and values."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
