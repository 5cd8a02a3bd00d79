"""Attention that reads keys and values as a quantized cache would return them, for every token of a text at once."""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models.checkpoint_config import GGUF_NATIVE, GGUF_NATIVE_CACHE, QUANTIZED_CACHE

Tensor = torch.Tensor
_FP8_MAX = 448.0  # largest number of float8 e4m3
CACHE_ATTENTION = "sdpa_quantized_cache"  # transformers' name of the attention below


@dataclass(frozen=True)
class Rounding:
    """How keys, or values, are rounded."""

    bits: int | str  # 16: not at all; "fp8": float8 e4m3; else ``2^bits`` evenly spaced values from minimum to maximum
    per: str  # "token": `group` neighbours of a head's vector share a scale; "channel": a channel of `group` tokens
    group: int

    def __post_init__(self) -> None:
        known = self.bits == "fp8" or (type(self.bits) is int and 1 <= self.bits <= 16)
        if not known or self.per not in ("token", "channel") or type(self.group) is not int or self.group < 1:
            raise ValueError(f"unknown rounding: {self}")

    def bytes_per_number(self, plain: float) -> float:
        """Return what a number takes with its part of a 16-bit scale (and, of integers, a 16-bit offset) per group.

        `plain` is what a number that is not rounded takes.
        """
        if self.bits == 16:
            return plain
        return 1 + 2 / self.group if self.bits == "fp8" else int(self.bits) / 8 + 4 / self.group

    def by_token(self, vectors: Tensor) -> Tensor:
        """Return vectors, shape (batch, heads, tokens, head_dim), each group of neighbours in a head rounded."""
        groups = vectors.reshape(*vectors.shape[:-1], -1, self.group).float()
        rounded = self._on_grid(groups, groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True))
        return rounded.to(vectors.dtype).reshape(vectors.shape)

    def by_channel(self, vectors: Tensor, number: Tensor) -> Tensor:
        """Return vectors with each channel rounded in groups of tokens.

        `number`, shape (batch, tokens), is the place of each token in its text, from 0; -1 is padding.
        """
        of_token = torch.where(number < 0, 0, number // self.group + 1)  # padding has a group of its own
        index = of_token[:, None, :, None].expand(vectors.shape)
        shape = (*vectors.shape[:2], int(of_token.max()) + 1, vectors.shape[-1])
        low, high = (
            vectors.new_zeros(shape, dtype=torch.float32)
            .scatter_reduce(2, index, vectors.float(), reduction, include_self=False)
            .gather(2, index)
            for reduction in ("amin", "amax")
        )
        rounded: Tensor = self._on_grid(vectors.float(), low, high).to(vectors.dtype)
        return rounded

    def _on_grid(self, numbers: Tensor, low: Tensor, high: Tensor) -> Tensor:
        if self.bits == 16:
            return numbers
        if self.bits == "fp8":
            scale = torch.maximum(high, -low) / _FP8_MAX
            scaled = torch.where(scale > 0, numbers / scale, 0.0)
            return scaled.to(torch.float8_e4m3fn).float() * scale
        step = (high - low) / (2 ** int(self.bits) - 1)
        levels = torch.where(step > 0, (numbers - low) / step, 0.0).round()
        rounded: Tensor = levels * step + low
        return rounded


@dataclass(frozen=True)
class QuantizedCache:
    """What is rounded in a cache.

    Keys per channel are rounded when their group of tokens is complete, as in KIVI: until then they are read as they
    are. `residual`: the latest tokens, the present one among them, that are read as they are.
    """

    keys: Rounding
    values: Rounding
    residual: int = 0

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any]) -> "QuantizedCache":
        return cls(Rounding(**settings["keys"]), Rounding(**settings["values"]), int(settings["residual"]))

    def bytes_per_number(self, plain: float) -> float:
        """Return the bytes of a key and a value, of which one that is not rounded takes `plain`."""
        return self.keys.bytes_per_number(plain) + self.values.bytes_per_number(plain)

    @property
    def _depends_on_query(self) -> bool:
        """Whether a token is read rounded by some later tokens, and as it is by others."""
        return bool(self.residual) or "channel" in (self.keys.per, self.values.per)

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        """Compute attention with transformers' signature; every query reads what a cache holds at its time."""
        if not self._depends_on_query:
            key, value = self.keys.by_token(key), self.values.by_token(value)
            return sdpa_attention_forward(module, query, key, value, mask, **options)
        n_queries, n_keys = query.shape[-2], key.shape[-2]
        if mask is None:
            mask = torch.ones((1, 1, n_queries, n_keys), dtype=torch.bool, device=query.device)
            mask = mask.tril(n_keys - n_queries)
        seen = mask.any(-2)[:, 0]  # (batch, keys); padding is seen by nobody
        number = torch.where(seen, seen.cumsum(-1) - 1, -1).expand(key.shape[0], -1)
        present = torch.where(mask, number[:, None, None], -1).amax(-1, keepdim=True)  # number of the query's own token
        both_keys, both_values = (
            self._read(rounding, vectors, number, present)
            for rounding, vectors in ((self.keys, key), (self.values, value))
        )
        # Every key stands in the list once for each way in which some query reads it and its value.
        ways = [
            (keys, values, seen)
            for (keys, by_key), (values, by_value) in product(both_keys, both_values)
            if (seen := mask & by_key & by_value).any()
        ]
        key, value = (torch.cat([way[i] for way in ways], dim=2) for i in (0, 1))
        mask = torch.cat([seen.expand(key.shape[0], -1, -1, -1) for *_, seen in ways], dim=-1)
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    def _read(
        self, rounding: Rounding, vectors: Tensor, number: Tensor, present: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Return rounded vectors and the plain ones, each with what reads them, shape (batch, 1, queries, keys)."""
        number_of_key = number[:, None, None]
        written = present - self.residual  # number of the last token that is not among the latest
        if rounding.per == "token":
            rounded, plain = rounding.by_token(vectors), number_of_key > written
        else:
            rounded = rounding.by_channel(vectors, number)
            plain = (number_of_key // rounding.group + 1) * rounding.group - 1 > written
        return [(rounded, ~plain), (vectors, plain)]


def cache_bytes_per_token(config: Any) -> float | None:
    """Return the bytes of the keys and values of one token in all layers; None where a configuration does not say.

    ``2 x layers x key-value heads x head width`` numbers, each as large as the configuration's `dtype`, or as it says
    that they are rounded: by our own caches, compressed-tensors' ``kv_cache_scheme``, or llama.cpp's types. They are
    those that are written: a window, and a residual, change what is kept of long texts, and of short ones.
    """
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None)
    kinds = set(getattr(text, "layer_types", None) or ())
    if heads is None or getattr(text, "kv_lora_rank", None) or kinds - {"full_attention", "sliding_attention"}:
        return None
    dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None)
    if dtype is None:
        return None
    plain = float((getattr(torch, dtype) if isinstance(dtype, str) else dtype).itemsize)
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    numbers = int(getattr(text, "num_key_value_heads", None) or heads) * int(width)
    n_layers = int(text.num_hidden_layers)
    if getattr(config, GGUF_NATIVE, False):
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        named = [GGMLQuantizationType[name.upper()] for name in getattr(config, GGUF_NATIVE_CACHE, ["f16"] * 2)]
        per_number = [float(n_bytes) / block for block, n_bytes in map(GGML_QUANT_SIZES.__getitem__, named)]
        return float(n_layers * numbers * sum(per_number))
    quantization = getattr(config, "quantization_config", None) or {}
    if scheme := quantization.get("kv_cache_scheme"):  # its scales are those of whole tensors
        plain = float(scheme["num_bits"]) / 8
    caches = [QuantizedCache.of_settings(one) for one in getattr(text, QUANTIZED_CACHE, {}).values()]
    rounded = sum(cache.bytes_per_number(plain) for cache in caches)
    return numbers * (rounded + (n_layers - len(caches)) * 2 * plain)


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    """Compute attention with the cache that the model's configuration gives to the module's layer, if it has one."""
    settings = getattr(module.config, QUANTIZED_CACHE).get(str(module.layer_idx))
    if settings is None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    return QuantizedCache.of_settings(settings).attend(module, query, key, value, mask, **options)


def register_attention() -> None:
    """Register `_attend` with transformers; a second call changes nothing."""
    AttentionInterface.register(CACHE_ATTENTION, _attend)
    AttentionMaskInterface.register(CACHE_ATTENTION, sdpa_mask)


def quantize_cache(model: Any, caches: Mapping[int, QuantizedCache]) -> None:
    """Make attention layers, by their number, read rounded keys (after their rotation) and values.

    The caches are in the model's configuration from now on, and so in the ``config.json`` that it is saved with.
    """
    register_attention()
    config = model.config.get_text_config()
    before = config._attn_implementation
    setattr(config, QUANTIZED_CACHE, {str(layer): asdict(cache) for layer, cache in sorted(caches.items())})
    if before == "sdpa":
        model.set_attn_implementation(CACHE_ATTENTION)
    if config._attn_implementation != CACHE_ATTENTION:
        raise UnsupportedError(
            "Keys and values can only be rounded in transformers' sdpa attention",
            got=f"{type(model).__name__}, {before}",
        )


def attention_modules(model: Any) -> list[tuple[str, torch.nn.Module]]:
    """Return name and module of every layer's attention, in order; an `UnsupportedError` where one is not found."""
    n_layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    modules = [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx") and hasattr(module, "config")
    ]
    if [module.layer_idx for _, module in modules] != list(range(n_layers)):
        raise UnsupportedError(
            "The attention of each layer was not found, so that caches cannot be rounded layer by layer",
            allowed=f"{n_layers} attention modules with a layer_idx",
            got=f"{len(modules)} in {type(model).__name__}",
        )
    return modules


def with_cache(attention: Any, cache: QuantizedCache) -> torch.nn.Module:
    """Return a layer's attention with a quantized cache; its submodules and parameters are the given module's.

    So whoever replaces a submodule of one replaces it in both.
    """
    if "forward" in vars(attention):
        raise UnsupportedError("Attention whose weights are offloaded cannot be rounded alone", fix="Use device=auto")
    register_attention()
    rounded: torch.nn.Module = copy.copy(attention)
    config = copy.copy(attention.config)
    config._attn_implementation_internal = CACHE_ATTENTION
    setattr(config, QUANTIZED_CACHE, {str(attention.layer_idx): asdict(cache)})
    rounded.config = config
    return rounded
