"""KV-cache quantization: simulated for keys and values apart, and with the calibrated FP8 scales that vLLM reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from mlflow_compress.compression.backends import llmcompressor_backend as backend
from mlflow_compress.compression.layers import save_and_measure
from mlflow_compress.compression.method import CalibratedConfig, CompressionJob, Logits, Method, MethodConfig, register
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models.source_model import SourceModel

if TYPE_CHECKING:
    from mlflow_compress.models.architectures.quantized_cache import QuantizedCache

Bits = Literal[16, 8, 4, 3, 2, "fp8"]


class KvCacheConfig(MethodConfig):
    """Settings of `kv-cache`."""

    key_bits: Bits = 4  # Bits per number of the keys; "fp8": float8 e4m3; 16: keys are not rounded
    value_bits: Bits = 4  # The same of the values
    keys_per: Literal["token", "channel"] = "token"  # What shares a scale; "channel": a channel of token_group tokens
    cache_group: Annotated[int, Field(ge=1)] | Literal["head"] = "head"
    """Number of neighbours in a head's vector that share a scale and an offset; "head": one of each per vector."""
    token_group: int = Field(32, ge=1)  # Tokens that share the scales of keys_per=channel
    residual: int = Field(0, ge=0)  # Latest tokens that are read as they are

    @model_validator(mode="after")
    def _require_rounding(self) -> Self:
        if self.key_bits == self.value_bits == 16:
            raise ConfigError(
                "Method 'kv-cache' has nothing to round", got="key_bits=16, value_bits=16", fix="Use method none"
            )
        return self


@register
class KvCache(Method[KvCacheConfig]):
    """The base model, whose attention reads keys (after their rotation) and values as a quantized cache returns them.

    Every token is read from the cache, including the present one, while a text is scored and while one is written. So
    a text is scored as if it were decoded token by token. Integers lie on an asymmetric grid, for each head's vector of
    each token, or, for keys with ``keys_per=channel``, for each channel of `token_group` tokens, once all of them are
    there. That and a `residual` are KIVI's, whose groups become complete `residual` tokens at a time. Servers do not
    round a prompt while it is read, KIVI and transformers' `QuantizedCache` among them. Scales and offsets are not
    rounded here. The weights are the base's, so the checkpoint is as large; a server saves memory.
    """

    name = "kv-cache"
    description = "Keys and values rounded at evaluation time, to show what a quantized cache costs; weights unchanged"
    reference = "Liu et al. 2024 (KIVI), https://arxiv.org/abs/2402.02750"
    format = "safetensors (quantized_cache)"
    own_format = True
    Config = KvCacheConfig
    linear_only = False
    rounds_cache = True

    def label(self, config: KvCacheConfig) -> str:
        """Return ``kv-cache-k4-channel32-v2-r128``: what is not the default stands behind what it is about."""
        keys = f"k{config.key_bits}" + (f"-channel{config.token_group}" if config.keys_per == "channel" else "")
        group = "" if isinstance(config.cache_group, str) else f"-g{config.cache_group}"
        residual = f"-r{config.residual}" if config.residual else ""
        return f"{self.name}-{keys}-v{config.value_bits}{group}{residual}"

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
        window = getattr(model, "sliding_window", None) if getattr(model, "use_sliding_window", True) else None
        if config.keys_per == "channel" and window:
            raise UnsupportedError(
                "Keys are rounded by channel in groups of tokens, which attention in a window cuts",
                allowed="keys_per=token",
                got=f"sliding_window {window} in {source.architecture}",
            )

    def compress(self, job: CompressionJob[KvCacheConfig]) -> Logits:
        from mlflow_compress.models.architectures.quantized_cache import quantize_cache

        model = job.source.load(job.device)
        quantize_cache(model, dict.fromkeys(range(job.source.layers), quantized_cache(job.config, job.source)))
        return save_and_measure(job, model)


def quantized_cache(config: KvCacheConfig, source: SourceModel) -> QuantizedCache:
    """Return the cache of one layer that the settings of `kv-cache` describe."""
    from mlflow_compress.models.architectures.quantized_cache import QuantizedCache, Rounding

    width = config.cache_group
    width = head_dim(source.configuration().get_text_config()) if isinstance(width, str) else width
    return QuantizedCache(
        Rounding(config.key_bits, config.keys_per, width if config.keys_per == "token" else config.token_group),
        Rounding(config.value_bits, "token", width),
        config.residual,
    )


def head_dim(config: Any) -> int:
    """Return the width of an attention head's keys and values."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


class _Fp8CacheConfig(CalibratedConfig):
    """Settings of `kv-cache-fp8`."""

    calibration_samples: int = 32


@register
class Fp8Cache(Method[_Fp8CacheConfig]):
    """The base model with one scale per layer for its keys and one for its values, largest calibrated number / 448.

    The checkpoint's `kv_cache_scheme` makes transformers and vLLM round with these scales, also while a text is read.
    """

    name = "kv-cache-fp8"
    description = "Keys and values in 8-bit floats (e4m3), with calibrated scales per layer; weights unchanged"
    reference = "https://github.com/vllm-project/compressed-tensors (kv_cache_scheme); llm-compressor calibrates"
    format = "compressed-tensors (dense, kv_cache_scheme)"
    Config = _Fp8CacheConfig
    needs_calibration = True
    requires = ("llmcompressor",)
    runs_in = ("vLLM",)
    linear_only = False
    rounds_cache = True

    def compress(self, job: CompressionJob[_Fp8CacheConfig]) -> Logits:
        def recipe() -> list[object]:
            from llmcompressor.modifiers.quantization import QuantizationModifier

            scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
            return [QuantizationModifier(kv_cache_scheme=scheme)]

        return backend.run_oneshot(job, recipe)
