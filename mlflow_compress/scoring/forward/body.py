"""The model's body: final hidden states at the scored positions, by packs on cached prefixes or by plain batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicLayer

from mlflow_compress.errors import UnsupportedError
from mlflow_compress.scoring.forward.head import GivenLogits, Head, Logits
from mlflow_compress.scoring.forward.last_layer import at_rows, find_last_layer
from mlflow_compress.scoring.forward.tree_attention import tree_attention
from mlflow_compress.scoring.plan.units import NO_PREFIX, PackedBatch, PaddedBatch

Tensor = torch.Tensor
KeysValues = list[tuple[Tensor, Tensor]]  # per layer, each (1, n_heads, n_tokens, head_dim)


class Body:
    """Runs units of a plan through the model without its head.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        In eval mode. Its `base_model` gives `last_hidden_state`.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.base = model.base_model
        config = model.config.get_text_config(decoder=True)
        self.n_layers = int(config.num_hidden_layers)
        self._vocab_size = int(config.vocab_size)
        self._prefixes: dict[int, KeysValues] = {}
        self._last_layer = find_last_layer(self.base, self.n_layers)

    @property
    def device(self) -> torch.device:
        """Where token ids have to lie."""
        return torch.device(self.model.get_input_embeddings().weight.device)

    def run(self, unit: PackedBatch | PaddedBatch) -> Tensor:
        """Return the head's inputs at the unit's scored positions, in order, shape (k, hidden_size)."""
        with torch.inference_mode():
            return self._pack(unit) if isinstance(unit, PackedBatch) else self._batch(unit)

    def has(self, prefix: int) -> bool:
        """Whether a cached prefix is at hand."""
        return prefix == NO_PREFIX or prefix in self._prefixes

    def forget(self, prefix: int) -> None:
        """Free a cached prefix that no later unit needs."""
        self._prefixes.pop(prefix, None)

    def clear(self) -> None:
        """Free every cached prefix."""
        self._prefixes.clear()

    def check_last_layer(self) -> None:
        """Compute the last layer at every position from now on, if it is not the same at scored positions alone."""
        if self._last_layer is None:
            return
        ids = np.random.default_rng(2).integers(0, self._vocab_size, size=12).astype(np.int32)
        rows = np.asarray([2, 3, 11])
        some, every = (
            self.run(PaddedBatch([ids], [rows])),
            self.run(PaddedBatch([ids], [np.arange(12)]))[torch.from_numpy(rows)],
        )
        apart, size = (float(x.float().square().mean().sqrt()) for x in (some - every, every))
        if not apart <= (1e-4 if _is_exact(self.model) else 0.02) * size:
            self._last_layer = None

    def _forward(self, **inputs: Any) -> Tensor:
        """Return what the head gets, shape (n_rows, n_tokens, hidden_size)."""
        hidden: Tensor = self.base(return_dict=True, **inputs).last_hidden_state
        return hidden

    def _batch(self, unit: PaddedBatch) -> Tensor:
        lengths = [len(s) for s in unit.sequences]
        # Right padding is never seen by a causal model; any id will do.
        ids = np.zeros((len(lengths), max(lengths)), dtype=np.int64)
        real = np.zeros_like(ids)
        for row, sequence in enumerate(unit.sequences):
            ids[row, : len(sequence)] = sequence
            real[row, : len(sequence)] = 1
        # An all-ones mask would only keep sdpa from its causal kernel.
        mask = None if min(lengths) == max(lengths) else torch.from_numpy(real).to(self.device)
        batch_rows = np.repeat(np.arange(len(lengths)), [len(r) for r in unit.rows])
        where = torch.from_numpy(batch_rows), torch.from_numpy(np.concatenate(unit.rows))
        with at_rows(self._last_layer, where):
            hidden = self._forward(
                input_ids=torch.from_numpy(ids).to(self.device), attention_mask=mask, use_cache=False
            )
        return hidden[where[0].to(hidden.device), where[1].to(hidden.device)]

    def _pack(self, unit: PackedBatch) -> Tensor:
        prefix = self._prefixes[unit.prefix] if unit.prefix != NO_PREFIX else []
        cache = fork(prefix, self.n_layers)
        seen = prefix[0][0].shape[-2] if prefix else 0
        mask = None if unit.is_path and not seen else self._mask(unit, seen)
        rows = torch.from_numpy(unit.rows)
        where = torch.zeros_like(rows), rows
        with tree_attention(unit, mask, seen, self.n_layers - 1), at_rows(self._last_layer, where):
            hidden = self._forward(
                input_ids=torch.from_numpy(unit.ids.astype(np.int64))[None].to(self.device),
                position_ids=torch.from_numpy(unit.positions.astype(np.int64))[None].to(self.device),
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
            )
        if unit.keep != NO_PREFIX:
            self._prefixes[unit.keep] = keys_values(cache)
        return hidden[0, rows.to(hidden.device)]

    def _mask(self, unit: PackedBatch, seen: int) -> Tensor:
        """Return the additive mask, shape (1, 1, q, seen + q): everything cached, and the token's own path."""
        dtype = self.model.dtype if self.model.dtype.is_floating_point else torch.float32
        n = len(unit.ids)
        index = torch.arange(n)
        ends = torch.from_numpy(unit.ends)
        visible = (index[:, None] >= index[None, :]) & (index[:, None] < ends[None, :])
        mask = torch.zeros((1, 1, n, seen + n), dtype=dtype)
        mask[0, 0, :, seen:].masked_fill_(~visible, torch.finfo(dtype).min)
        return mask.to(self.device)


class WholeModel(Body):
    """For a model whose body cannot be told from its head: its rows are log-probabilities, shape (k, vocab_size).

    A model with a method `logits_at` (`architectures.native_gguf`) gives them at the scored positions only.
    """

    def _batch(self, unit: PaddedBatch) -> Tensor:
        if not hasattr(self.model, "logits_at"):
            return super()._batch(unit)
        return torch.log_softmax(self.model.logits_at(unit.sequences, unit.rows), dim=-1)

    def _forward(self, **inputs: Any) -> Tensor:
        return torch.log_softmax(self.model(return_dict=True, **inputs).logits.float(), dim=-1)


def fork(prefix: KeysValues, n_layers: int) -> Cache:
    """Return a cache that begins with `prefix` (empty: an empty cache) and grows without changing it."""
    layers = [DynamicLayer() for _ in range(n_layers)]
    for layer, (keys, values) in zip(layers, prefix, strict=False):
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values  # an update concatenates into new tensors
    return Cache(layers=layers)


def keys_values(cache: Cache) -> KeysValues:
    """Return what a cache holds, layer by layer."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def split_body_and_head(model: Any) -> tuple[Body, Logits, str | None]:
    """Return a model's body and head, checked on a probe against the model's own logits.

    The last layer is spared unscored positions only where that is seen not to change the scored ones.

    Where they do not give them (the head reads more than the last hidden states, or cannot be found), the whole model
    serves as the body, and the third value says why.
    """
    body = Body(model)
    try:
        head = Head(model)
        reason = _check_head(body, head)
    except (UnsupportedError, TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as error:
        reason = f"body and head do not run apart ({type(error).__name__}: {error})"
    if reason is not None:
        body = WholeModel(model)
    body.check_last_layer()
    return (body, head, None) if reason is None else (body, GivenLogits(), reason)


def _check_head(body: Body, head: Head) -> str | None:
    model = body.model
    vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
    ids = np.random.default_rng(1).integers(0, vocab_size, size=12).astype(np.int32)
    states = body.run(PaddedBatch([ids], [np.arange(len(ids))]))
    with torch.inference_mode():
        inputs = torch.from_numpy(ids.astype(np.int64))[None].to(body.device)
        own = torch.log_softmax(model(input_ids=inputs, use_cache=False, return_dict=True).logits[0].float(), dim=-1)
    # In another order: a head that looks at a row's place would show.
    ours = torch.log_softmax(head.logits(states.flip(0)), dim=1).flip(0).to(own.device)
    worst = float((ours - own).abs().max())
    # Half-precision logits are rounded to 3 digits and int8 kernels depend on the batch; a wrong head is far off.
    if not worst <= (1e-3 if _is_exact(model) else 0.05 * float(own.abs().max())):
        return f"the head on the body's states differs from the model's log-probabilities by {worst:.1e} nat"
    return None


def _is_exact(model: Any) -> bool:
    return model.dtype == torch.float32 and not getattr(model, "is_quantized", False)


def check_can_pack(body: Body, max_length: int) -> str | None:
    """Return why packs would not give this model's own states for sequences up to `max_length`; None if they do.

    The configuration is read for what a short probe cannot show (windows, position scaling by length); then a probe of
    two branches behind a cached prefix is compared with the two plain sequences.
    """
    config = body.model.config.get_text_config(decoder=True)
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in ("eager", "sdpa"):
        return f"attention {implementation!r} does not take a block mask"
    for name in ("sliding_window", "attention_chunk_size"):
        window = getattr(config, name, None)
        if window is not None and getattr(config, "use_sliding_window", True) and max_length > window:
            return f"{name} {window} is shorter than the longest sequence ({max_length} tokens)"
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {str(r.get("rope_type")) for r in [rope, *(v for v in rope.values() if isinstance(v, dict))]}
    if kinds & {"dynamic", "longrope"}:
        return f"positions are scaled by the sequence length ({', '.join(sorted(kinds))})"
    return _probe(body, int(config.vocab_size))


def _probe(body: Body, vocab_size: int) -> str | None:
    ids = np.random.default_rng(0).integers(0, vocab_size, size=20).astype(np.int32)
    stem, left, right = ids[:8], ids[8:14], ids[14:20]
    every = np.arange
    first = PackedBatch(stem, every(8, dtype=np.int32), np.full(8, 8, np.int32), every(0), keep=1)
    both = PackedBatch(
        np.concatenate([left, right]),
        np.concatenate([every(8, 14, dtype=np.int32)] * 2),
        np.repeat(np.asarray([6, 12], np.int32), 6),
        every(12),
        prefix=1,
    )
    wanted = [np.concatenate([stem, left]), np.concatenate([stem, right]), left, right]
    plain = [body.run(PaddedBatch([s], [every(len(s) - 6, len(s))])).float() for s in wanted]
    try:
        body.run(first)
        packed = body.run(both).float()
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, NotImplementedError) as error:
        return f"the model does not take a forked cache with a block mask ({type(error).__name__}: {error})"
    finally:
        body.clear()
    truth, alone = torch.cat(plain[:2]), torch.cat(plain[2:])
    wrong, context, size = (float(t.square().mean().sqrt()) for t in (packed - truth, alone - truth, truth))
    # A wrong mask or position is as large as the effect of the context; rounding, even of int8, is far below it.
    if not wrong <= max(1e-4 * size, 0.1 * context):
        return f"packed states differ from plain ones by {wrong / size:.1e} of their size"
    return None
