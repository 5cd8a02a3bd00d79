"""A model whose attention reads rounded keys and values; stored as the base with an entry in its configuration."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils.quantization_config import QuantizationConfigMixin

from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models.architectures.own_format import OwnFormat

QUANT_METHOD = "quantized_cache"


def rounded_cache(vectors: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Return the vectors with every group of neighbours in a head rounded to ``2^bits`` evenly spaced values.

    The values range from the smallest to the largest number of the group.

    Parameters
    ----------
    vectors : torch.Tensor
        Keys or values, shape (batch, heads, tokens, head_dim).
    bits, group : int
        `group` divides head_dim.
    """
    groups = vectors.reshape(*vectors.shape[:-1], -1, group).float()
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    levels = torch.where(step > 0, (groups - low) / step, 0.0).round()
    values: torch.Tensor = levels * step + low
    return values.to(vectors.dtype).reshape(vectors.shape)


def quantize_cache(model: Any, bits: int, group: int) -> None:
    """Make every attention layer read rounded keys (after their rotation) and values.

    Raises
    ------
    UnsupportedError
        The model's attention is not transformers' own `sdpa`.
    """
    name = f"sdpa_cache_{bits}bit_g{group}"

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        key, value = rounded_cache(key, bits, group), rounded_cache(value, bits, group)
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    before = model.config.get_text_config()._attn_implementation
    if before == "sdpa":
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, sdpa_mask)
        model.set_attn_implementation(name)
    if model.config.get_text_config()._attn_implementation != name:
        raise UnsupportedError(
            "Keys and values can only be rounded in transformers' sdpa attention",
            got=f"{type(model).__name__}, {before}",
        )


class QuantizedCacheConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The rounding settings in ``config.json``."""

    def __init__(self, cache_bits: int, cache_group: int, **kwargs: Any) -> None:
        super().__init__(QUANT_METHOD)
        self.cache_bits, self.cache_group = cache_bits, cache_group


class QuantizedCacheQuantizer(OwnFormat):
    """Transformers' hook after loading, which makes attention round; the weights are not quantized."""

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        quantize_cache(model, self.quantization_config.cache_bits, self.quantization_config.cache_group)
        return model
