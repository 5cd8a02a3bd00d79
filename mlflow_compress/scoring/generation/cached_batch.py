"""Rows that are decoded together with one cache. Rows leave it and enter it, and nothing in it is computed again."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from mlflow_compress.scoring.forward.body import scaled_positions
from mlflow_compress.scoring.generation.drawing import draw
from mlflow_compress.scoring.generation.generation_rows import CausalLM, Ending, GenerationRow
from mlflow_compress.scoring.generation.sampling import GenerationConfig

Tensor = torch.Tensor
_SPARE = 64  # positions; how much room a cache gets when it is full
_LONGROPE_ONLY = ("Phi3ForCausalLM",)  # what these prepare in their own way is for scaled positions alone


class CachedBatch:
    """Rows that grow by one token a step.

    Rows are right-aligned, as in transformers' `generate`. A mask hides what is before a row's beginning. So a row's
    logits depend on the other rows by rounding only.

    Parameters
    ----------
    loaded : CausalLM
        A model for which `reason_not_to_cache` is None.
    config : GenerationConfig
    ending : Ending
    """

    def __init__(self, loaded: CausalLM, config: GenerationConfig, ending: Ending) -> None:
        self.rows: list[GenerationRow] = []
        self._loaded, self._config, self._ending = loaded, config, ending
        self._accepted = inspect.signature(loaded.model.forward).parameters
        self._layers: list[Any] = []

    def regroup(self, fresh: Sequence[GenerationRow]) -> None:
        """Remove the rows that are done, and add others, each with its first token. Equal prompts are read once."""
        kept = [i for i, row in enumerate(self.rows) if not row.done]
        parts = [(self._layers, torch.tensor(kept))] if kept else []
        # What is cached: everything but a row's last token.
        length = max([*(self.rows[i].length - 1 for i in kept), *(len(row.prompt) for row in fresh)])
        if fresh:
            prompts = list(dict.fromkeys(tuple(row.prompt) for row in fresh))
            which = torch.tensor([prompts.index(tuple(row.prompt)) for row in fresh])
            layers, logits = self._read(prompts)
            parts.append((layers, which))
            self._add(fresh, logits.index_select(0, which.to(logits.device)))
        self._layers = [_joined(layers, length) for layers in _by_layer(parts)]
        self.rows = [*(self.rows[i] for i in kept), *fresh]

    def step(self) -> None:
        """Add a token to every row that is not done. The others are computed too, and ignored."""
        n_cached = self._layers[0].get_seq_length()
        lengths = [row.length for row in self.rows]
        last = [row.tokens[-1] if row.tokens else 0 for row in self.rows]
        self._add(self.rows, self._forward(torch.tensor(last)[:, None], lengths, n_cached + 1, self._layers))

    def _read(self, prompts: Sequence[tuple[int, ...]]) -> tuple[list[Any], Tensor]:
        """Return the cache's layers after the prompts, and the logits of the next tokens."""
        length = max(map(len, prompts))
        ids = torch.zeros((len(prompts), length), dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            ids[i, length - len(prompt) :] = torch.tensor(prompt)
        layers = [
            GrowingLayer() if type(layer) is DynamicLayer else layer
            for layer in DynamicCache(config=self._loaded.model.config).layers
        ]
        return layers, self._forward(ids, [len(prompt) for prompt in prompts], length, layers)

    def _forward(self, ids: Tensor, lengths: Sequence[int], n_keys: int, layers: list[Any]) -> Tensor:
        """Return the logits after the last token of `ids`, whose rows have `lengths` tokens in all."""
        begin = n_keys - torch.tensor(lengths)[:, None]
        # `generate` gives padding the position 0 too.
        positions = (torch.arange(n_keys - ids.shape[1], n_keys) - begin).clamp(min=0)
        inputs = {
            "input_ids": ids,
            "attention_mask": (torch.arange(n_keys) >= begin).long(),
            **({"position_ids": positions} if "position_ids" in self._accepted else {}),
        }
        output = self._loaded.model(
            **{name: tensor.to(self._loaded.device) for name, tensor in inputs.items()},
            past_key_values=Cache(layers=layers),
            use_cache=True,
            **({"logits_to_keep": 1} if "logits_to_keep" in self._accepted else {}),
            return_dict=True,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _add(self, rows: Sequence[GenerationRow], logits: Tensor) -> None:
        """Choose the next token of each row that is not done, and add it."""
        # Rows that are done are computed as greedy ones.
        temperatures = [0.0 if row.done else row.temperature for row in rows]
        u = [row.u[len(row.tokens)] if t > 0 else 0.0 for row, t in zip(rows, temperatures, strict=True)]
        chosen = draw(
            logits,
            torch.tensor(u, dtype=torch.float64).to(logits.device),
            torch.tensor(temperatures, dtype=torch.float32).to(logits.device),
            top_k=self._config.top_k,
            top_p=self._config.top_p,
        )
        for row, token in zip(rows, chosen.tolist(), strict=True):
            if not row.done:
                self._ending.add(row, token)


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of the cache with spare room. transformers' own copies everything at each token."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values, each (rows, heads, tokens, size), and return all of them."""
        n = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            self._room = (key_states, value_states)
            return key_states, value_states
        stop = n + key_states.shape[-2]
        if stop > self._room[0].shape[-2]:
            self._room = (_with_spare(self.keys, stop), _with_spare(self.values, stop))
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, n:stop] = new
        self.keys, self.values = (room[:, :, :stop] for room in self._room)
        return self.keys, self.values

    def replace(self, keys: Tensor, values: Tensor) -> None:
        """Take other keys and values."""
        self.keys, self.values = self._room = (keys, values)


def _with_spare(cached: Tensor, stop: int) -> Tensor:
    room = cached.new_empty((*cached.shape[:2], stop + _SPARE, cached.shape[-1]))
    room[:, :, : cached.shape[-2]] = cached
    return room


def _by_layer(parts: Sequence[tuple[list[Any], Tensor]]) -> list[list[tuple[Any, Tensor]]]:
    """Turn (layers, rows) of each part into (layer, rows) of each part, by layer."""
    return [
        [(layer, rows) for layer, (_, rows) in zip(layers, parts, strict=True)]
        for layers in zip(*(layers for layers, _ in parts), strict=True)
    ]


def _joined(parts: Sequence[tuple[Any, Tensor]], length: int) -> Any:
    """Return one layer with the given rows of each part, all of them `length` tokens long."""
    layer = parts[0][0]
    stored = min(length, layer.sliding_window - 1) if layer.is_sliding else length
    keys, values = (
        torch.cat([_right_aligned(getattr(part, name), rows, stored) for part, rows in parts])
        for name in ("keys", "values")
    )
    if isinstance(layer, GrowingLayer):
        layer.replace(keys, values)
    else:
        layer.keys, layer.values, layer.cumulative_length = keys, values, length
    return layer


def _right_aligned(cached: Tensor, rows: Tensor, length: int) -> Tensor:
    """Return rows of cached keys or values with `length` tokens: cut at the beginning, or zeros put before it."""
    short = cached[:, :, max(cached.shape[-2] - length, 0) :]
    return torch.nn.functional.pad(short.index_select(0, rows.to(short.device)), (0, 0, length - short.shape[-2], 0))


def reason_not_to_cache(model: Any) -> str | None:
    """Return why `CachedBatch` cannot decode with this model as transformers' `generate` would; None if it can."""
    own = type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    if own and type(model).__name__ not in _LONGROPE_ONLY:
        return "its inputs are prepared in a way of its own"
    if model.is_remote_code():
        return "its code comes with the checkpoint"
    accepted = inspect.signature(model.forward).parameters
    if "past_key_values" not in accepted or "attention_mask" not in accepted or hasattr(model, "logits_at"):
        return "it keeps its caches itself"
    config = model.config.get_text_config(decoder=True)
    kinds = {type(layer) for layer in DynamicCache(config=config).layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if kinds:
        return f"its cache has layers of another kind ({', '.join(sorted(kind.__name__ for kind in kinds))})"
    if getattr(config, "attention_chunk_size", None):
        return "its attention is cut at fixed positions"
    if scaled := scaled_positions(config):
        return f"positions are scaled by the sequence length ({scaled})"
    return None
