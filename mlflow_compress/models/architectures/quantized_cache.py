"""Attention that reads keys and values as a quantized cache would return them, for every token of a text at once."""

from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mlflow_compress.errors import UnsupportedError

Tensor = torch.Tensor
FP8_MAX = 448.0  # largest number of float8 e4m3


@dataclass(frozen=True)
class Rounding:
    """How keys, or values, are rounded."""

    bits: int | str  # 16: not at all; "fp8": float8 e4m3; else ``2^bits`` evenly spaced values from minimum to maximum
    per: str  # "token": `group` neighbours of a head's vector share a scale; "channel": a channel of `group` tokens
    group: int

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
            scale = torch.maximum(high, -low) / FP8_MAX
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

    def settings(self) -> dict[str, Any]:
        """Return the entries of ``config.json``."""
        return asdict(self)

    @classmethod
    def of_settings(cls, settings: Any) -> "QuantizedCache":
        """Return the cache that `settings` describes."""
        return cls(Rounding(**settings.keys), Rounding(**settings.values), settings.residual)

    @property
    def depends_on_query(self) -> bool:
        """Whether a token is read rounded by some later tokens, and as it is by others."""
        return bool(self.residual) or "channel" in (self.keys.per, self.values.per)

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        """Compute attention with transformers' signature; every query reads what a cache holds at its time."""
        if not self.depends_on_query:
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


def quantize_cache(model: Any, cache: QuantizedCache) -> None:
    """Make every attention layer read rounded keys (after their rotation) and values."""
    parts = (*asdict(cache.keys).values(), *asdict(cache.values).values(), cache.residual)
    name = "_".join(map(str, ("sdpa_cache", *parts)))
    before = model.config.get_text_config()._attn_implementation
    if before == "sdpa":
        AttentionInterface.register(name, cache.attend)
        AttentionMaskInterface.register(name, sdpa_mask)
        model.set_attn_implementation(name)
    if model.config.get_text_config()._attn_implementation != name:
        raise UnsupportedError(
            "Keys and values can only be rounded in transformers' sdpa attention",
            got=f"{type(model).__name__}, {before}",
        )
