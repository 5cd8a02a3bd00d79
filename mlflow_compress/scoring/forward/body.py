"""The model's body: final hidden states at the scored positions, from packed or from padded batches."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicLayer

from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models.length_regimes import BASE, length_regimes
from mlflow_compress.models.offloading import probed
from mlflow_compress.models.placement import sent_to
from mlflow_compress.models.weight_groups import decoder_layers
from mlflow_compress.scoring.forward.head import Head, IdentityHead, LanguageModelHead, replaced_modules
from mlflow_compress.scoring.forward.tree_attention import TreeAttention, install_tree_attention
from mlflow_compress.scoring.plan.packing import NO_PREFIX, Ids, PackedBatch, PaddedBatch

Tensor = torch.Tensor
KeysValues = list[tuple[Tensor, Tensor]]  # per layer, each (1, n_heads, n_tokens, head_dim)
MLP = "mlp"


def _find_last_layer(model: Any) -> torch.nn.Module | None:
    """Return a model's last layer, or None where it has no module `mlp` that takes hidden states and nothing else."""
    layers = decoder_layers(model)
    last = layers[1][-1] if layers is not None else None
    mlp = getattr(last, MLP, None)
    return last if mlp is not None and len(inspect.signature(mlp.forward).parameters) == 1 else None


class _MlpAtRows(torch.nn.Module):
    """Replaces the feed-forward part: computes it at some positions, and returns 0 at all others."""

    def __init__(self, mlp: torch.nn.Module, where: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.mlp, self.where = mlp, where

    def forward(self, states: Tensor) -> Any:
        where = tuple(index.to(states.device) for index in self.where)  # copied where a model is on several devices
        computed = self.mlp(states[where][None])
        if not isinstance(computed, Tensor):  # a mixture of experts returns its router's choices too
            return self.mlp(states)
        out = computed.new_zeros((*states.shape[:-1], computed.shape[-1]))
        out[where] = computed[0]
        return out


def _mlp_at_rows(layer: torch.nn.Module | None, where: tuple[Tensor, Tensor]) -> AbstractContextManager[None]:
    """Return a block within which a layer's feed-forward part is computed at some batch rows and positions only."""
    if layer is None:
        return nullcontext()
    return replaced_modules(layer, {MLP: _MlpAtRows(layer.get_submodule(MLP), where)})


class Body:
    """Runs the units of a plan through a model in eval mode without its head."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.base = model.base_model
        config = model.config.get_text_config(decoder=True)
        self.n_layers = int(config.num_hidden_layers)
        self._vocab_size = int(config.vocab_size)
        self._prefixes: dict[int, KeysValues] = {}
        self._last_layer = _find_last_layer(model)

    @property
    def device(self) -> torch.device:
        """Device that token ids must be on."""
        return torch.device(self.model.get_input_embeddings().weight.device)

    @cached_property
    def pack_objection(self) -> str | None:
        """Why a probe finds that packs have other states than plain sequences; None where they agree."""
        return probed(self.model, lambda: _probe(self, self._vocab_size), lambda objection: objection is not None)

    def run(self, unit: PackedBatch | PaddedBatch, attention: TreeAttention | None = None) -> Tensor:
        """Return the head's inputs at the unit's scored positions, in order, shape (k, hidden_size).

        Without `attention` (from `install_tree_attention`), a pack is computed with its full mask: the same states
        within rounding, in more time.
        """
        with torch.inference_mode():
            return self._run_packed(unit, attention) if isinstance(unit, PackedBatch) else self._run_padded(unit)

    def has(self, prefix: int) -> bool:
        return prefix == NO_PREFIX or prefix in self._prefixes

    def forget(self, prefix: int) -> None:
        self._prefixes.pop(prefix, None)

    def clear(self) -> None:
        self._prefixes.clear()

    def check_last_layer(self) -> None:
        """Compare the last layer at some positions with the same at all; from now on compute all if they differ."""
        if self._last_layer is None:
            return
        ids = np.random.default_rng(2).integers(0, self._vocab_size, size=12).astype(np.int32)
        rows = np.asarray([2, 3, 11])
        some = self.run(PaddedBatch([ids], [rows]))
        every = self.run(PaddedBatch([ids], [np.arange(12)]))[torch.from_numpy(rows)]
        difference, size = (float(x.float().square().mean().sqrt()) for x in (some - every, every))
        if not difference <= (1e-4 if _is_exact(self.model) else 0.02) * size:
            self._last_layer = None

    def _forward(self, **inputs: Any) -> Tensor:
        """Return the inputs of the language-model head at all positions, shape (n_rows, n_tokens, hidden_size)."""
        hidden: Tensor = self.base(return_dict=True, **inputs).last_hidden_state
        return hidden

    def _run_padded(self, unit: PaddedBatch) -> Tensor:
        lengths = np.asarray([len(s) for s in unit.sequences])
        # A causal model never sees padding on the right; any id will do.
        ids = np.zeros((len(lengths), lengths.max()), dtype=np.int64)
        for row, sequence in enumerate(unit.sequences):
            ids[row, : len(sequence)] = sequence
        batch_rows = np.repeat(np.arange(len(lengths)), [len(r) for r in unit.rows])
        flat, ends, *where = self._sent(ids.reshape(-1), lengths, batch_rows, np.concatenate(unit.rows))
        mask = None  # with a mask of ones, sdpa would not choose its faster causal kernel
        if lengths.min() < lengths.max():
            mask = (torch.arange(ids.shape[1], device=self.device) < ends[:, None]).long()
        with _mlp_at_rows(self._last_layer, (where[0], where[1])):
            hidden = self._forward(input_ids=flat.view(ids.shape), attention_mask=mask, use_cache=False)
        return hidden[where[0].to(hidden.device), where[1].to(hidden.device)]

    def _run_packed(self, unit: PackedBatch, attention: TreeAttention | None) -> Tensor:
        prefix = self._prefixes[unit.prefix] if unit.prefix != NO_PREFIX else []
        cache = _fork_kv_cache(prefix, self.n_layers)
        seen = prefix[0][0].shape[-2] if prefix else 0
        ids, positions, ends, rows = self._sent(unit.ids, unit.positions, unit.ends, unit.rows)
        mask = None if unit.is_path and not seen else self._mask(ends, seen)
        where = torch.zeros_like(rows), rows
        as_tree = attention.for_pack(unit, rows, mask, seen, self.n_layers - 1) if attention else nullcontext()
        with as_tree, _mlp_at_rows(self._last_layer, where):
            hidden = self._forward(
                input_ids=ids[None],
                position_ids=positions[None],
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
            )
        if unit.keep != NO_PREFIX:
            self._prefixes[unit.keep] = [(layer.keys, layer.values) for layer in cache.layers]
        return hidden[0, rows.to(hidden.device)]

    def _sent(self, *arrays: np.ndarray[Any, Any]) -> tuple[Tensor, ...]:
        """Return arrays of integers, of one dimension each, on the model's device: all a unit needs goes up at once."""
        whole = torch.from_numpy(np.concatenate(arrays, dtype=np.int64))
        return torch.split(sent_to(self.device, whole), [len(array) for array in arrays])

    def _mask(self, ends: Tensor, seen: int) -> Tensor:
        """Return the additive mask, shape (1, 1, q, seen + q): a token sees the cached prefix and its own path."""
        dtype = self.model.dtype if self.model.dtype.is_floating_point else torch.float32
        n = len(ends)
        index = torch.arange(n, device=ends.device)
        visible = (index[:, None] >= index[None, :]) & (index[:, None] < ends[None, :])
        # Its rows begin at multiples of 8, or the attention of a GPU would copy the whole of it in every layer.
        mask = torch.zeros((1, 1, n, -(-(seen + n) // 8) * 8), dtype=dtype, device=ends.device)[..., : seen + n]
        mask[0, 0, :, seen:].masked_fill_(~visible, torch.finfo(dtype).min)
        return mask


class WholeModelBody(Body):
    """The body of a model that cannot be split: it returns log-probabilities, shape (k, vocab_size), not states.

    A model with a method `logits_at` (`architectures.native_gguf`) computes them at the scored positions only.
    """

    def _run_padded(self, unit: PaddedBatch) -> Tensor:
        if not hasattr(self.model, "logits_at"):
            return super()._run_padded(unit)
        return torch.log_softmax(self.model.logits_at(unit.sequences, unit.rows), dim=-1)

    def _forward(self, **inputs: Any) -> Tensor:
        return torch.log_softmax(self.model(return_dict=True, **inputs).logits.float(), dim=-1)


def _fork_kv_cache(prefix: KeysValues, n_layers: int) -> Cache:
    """Return a new cache that begins with `prefix` (an empty list: an empty cache) and never changes it."""
    layers = [DynamicLayer() for _ in range(n_layers)]
    for layer, (keys, values) in zip(layers, prefix, strict=False):
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values  # an update concatenates into new tensors
    return Cache(layers=layers)


def split_body_and_head(model: Any) -> tuple[Body, LanguageModelHead, str | None]:
    """Return a model's body, its head, and None.

    A probe compares head(body(x)) with the model's own logits. Where they differ (the head reads more than the last
    hidden states), or no head is found, the whole model serves as the body, and the third value is the reason.
    The last layer is computed at scored positions only if a probe shows that this does not change their states.
    """
    last_layer = _find_last_layer(model)
    return probed(model, lambda: _split(model), lambda it: it[2] is not None or it[0]._last_layer is not last_layer)


def _split(model: Any) -> tuple[Body, LanguageModelHead, str | None]:
    body = Body(model)
    try:
        head = Head(model)
        reason = _check_head(body, head)
    except (UnsupportedError, TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as error:
        reason = f"body and head cannot be run separately ({type(error).__name__}: {error})"
    if reason is not None:
        body = WholeModelBody(model)
    body.check_last_layer()
    return (body, head, None) if reason is None else (body, IdentityHead(), reason)


def _check_head(body: Body, head: Head) -> str | None:
    model = body.model
    vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
    ids = np.random.default_rng(1).integers(0, vocab_size, size=12).astype(np.int32)
    states = body.run(PaddedBatch([ids], [np.arange(len(ids))]))
    with torch.inference_mode():
        inputs = torch.from_numpy(ids.astype(np.int64))[None].to(body.device)
        expected = torch.log_softmax(
            model(input_ids=inputs, use_cache=False, return_dict=True).logits[0].float(), dim=-1
        )
    # In reverse order, to reveal a head whose output depends on a row's position.
    split = torch.log_softmax(head.logits(states.flip(0)), dim=1).flip(0).to(expected.device)
    worst = float((split - expected).abs().max())
    # Half-precision logits are rounded to 3 digits and int8 kernels depend on the batch; a wrong head is far off.
    if not worst <= (1e-3 if _is_exact(model) else 0.05 * float(expected.abs().max())):
        return f"the head on the body's states differs from the model's log-probabilities by {worst:.1e} nat"
    return None


def _is_exact(model: Any) -> bool:
    return model.dtype == torch.float32 and not getattr(model, "is_quantized", False)


def reason_not_to_pack(body: Body, max_length: int) -> str | None:
    """Return why packed batches would give this model other states than padded ones; None if they agree.

    First the configuration is read for what a short probe cannot show: attention windows shorter than `max_length`, and
    sequences so long that they have other rotary frequencies than short ones. Then a probe of two branches after a
    cached prefix is compared with the two plain sequences.
    """
    config = body.model.config.get_text_config(decoder=True)
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in ("eager", "sdpa"):
        return f"attention {implementation!r} does not take a block mask"
    for name in ("sliding_window", "attention_chunk_size"):
        window = getattr(config, name, None)
        if window is not None and getattr(config, "use_sliding_window", True) and max_length > window:
            return f"{name} {window} is shorter than the longest sequence ({max_length} tokens)"
    if length_regimes(body.model.config)(max_length) != BASE:
        return f"rotary frequencies change with the sequence length, and the longest has {max_length} tokens"
    return body.pack_objection


def probe_units(vocab_size: int) -> tuple[Ids, PackedBatch, PackedBatch]:
    """Return 20 token ids, a pack of the first 8, and one of two branches behind it with 6 of the others each."""
    ids = np.random.default_rng(0).integers(0, vocab_size, size=20).astype(np.int32)
    every = np.arange
    first = PackedBatch(ids[:8], every(8, dtype=np.int32), np.full(8, 8, np.int32), every(0), keep=1)
    both = PackedBatch(
        ids[8:],
        np.concatenate([every(8, 14, dtype=np.int32)] * 2),
        np.repeat(np.asarray([6, 12], np.int32), 6),
        every(12),
        prefix=1,
    )
    return ids, first, both


def _probe(body: Body, vocab_size: int) -> str | None:
    ids, first, both = probe_units(vocab_size)
    stem, left, right = ids[:8], ids[8:14], ids[14:]
    wanted = [np.concatenate([stem, left]), np.concatenate([stem, right]), left, right]
    plain = [body.run(PaddedBatch([s], [np.arange(len(s) - 6, len(s))])).float() for s in wanted]
    try:
        with install_tree_attention() as attention:
            body.run(first, attention)
            packed = body.run(both, attention).float()
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, NotImplementedError) as error:
        return f"the model does not take a forked cache with a block mask ({type(error).__name__}: {error})"
    finally:
        body.clear()
    truth, without_context = torch.cat(plain[:2]), torch.cat(plain[2:])
    wrong, context, size = (float(t.square().mean().sqrt()) for t in (packed - truth, without_context - truth, truth))
    # The error of a wrong mask or position is as large as the effect of the context; rounding is far smaller.
    if not wrong <= max(1e-4 * size, 0.1 * context):
        return f"packed states differ from plain ones by {wrong / size:.1e} of their size"
    return None
