"""Tree attention for packed batches.

Attention is computed only inside each branch and towards its ancestors. In the last layer it is computed at the scored
positions only. Tokens of different branches do not see each other, so nothing else would be read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mlflow_compress.scoring.plan.packing import Ids, PackedBatch

Tensor = torch.Tensor
_SMALLEST_BRANCH = 32  # tokens; a call for a smaller branch costs more time than it saves
_SDPA = "sdpa"
# Without cuDNN's, which torch prefers on some GPUs: it is compiled for each new shape, and nearly every pack has one.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Branch:
    """The tokens `begin` .. `stop` - 1 of a pack. Inside the pack they see only each other and their ancestors."""

    begin: int
    stem: int  # Tokens before this index are seen by all later tokens of the branch
    stop: int
    # The branches after the stem; they do not see each other. Empty where one call for all is as fast; `stem` is then
    # `stop`.
    children: "list[Branch]"


def build_branches(ends: Ids, begin: int = 0, stop: int | None = None) -> Branch:
    """Return the tokens `begin` .. `stop` - 1 of a pack as a tree of branches; small neighbouring ones are merged."""
    stop = len(ends) if stop is None else stop
    branches_off = ends[begin:stop] < stop
    stem = begin + int(branches_off.argmax()) if branches_off.any() else stop
    reach = np.concatenate([[stem], np.maximum.accumulate(ends[stem:stop])])[:-1]
    cuts = [stem]
    for start in (stem + np.flatnonzero(reach <= np.arange(stem, stop))).tolist():
        if start - cuts[-1] >= _SMALLEST_BRANCH:
            cuts.append(start)
    if len(cuts) == 1:
        return Branch(begin, stop, stop, [])
    children = [build_branches(ends, a, b) for a, b in zip(cuts, [*cuts[1:], stop], strict=True)]
    return Branch(begin, stem, stop, children)


class TreeAttention:
    """Attention with transformers' signature: as a tree for the present pack, as the original for everything else."""

    def __init__(self, original: Callable[..., tuple[Tensor, Any]]) -> None:
        self._original = original
        self._pack: _Pack | None = None

    @contextmanager
    def for_pack(
        self, unit: PackedBatch, rows: Tensor, mask: Tensor | None, seen: int, last_layer: int
    ) -> Iterator[None]:
        """Within this block, attention calls that carry this mask are computed as a tree.

        `rows` are the unit's on the model's device. `mask` is the one that the model is given, shape
        (1, 1, q, seen + q); with None nothing changes. All tokens see `seen` cached ones. The output of `last_layer` is
        right at the scored positions and 0 elsewhere.
        """
        self._pack = None if mask is None else _Pack(unit.ends, rows, mask, seen, last_layer)
        try:
            yield
        finally:
            self._pack = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Return the attention output, shape (1, q, n_heads, head_dim), and None for the weights."""
        pack = self._pack
        if pack is not None and pack.is_mask(attention_mask, query, key) and kwargs.get("position_bias") is None:
            # In the last layer, if few enough positions are scored.
            is_last = getattr(module, "layer_idx", None) == pack.last_layer
            at_rows = is_last and 4 * len(pack.rows) <= pack.n_tokens
            if at_rows or (query.device.type == "cpu" and pack.tree.children and key.shape[-1] == value.shape[-1]):
                groups = query.shape[1] // key.shape[1]
                key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
                scale = kwargs.get("scaling")
                if at_rows:
                    return _attend_at_rows(query, key, value, pack.mask, pack.rows.to(query.device), scale), None
                return _attend_per_branch(query, key, value, pack.tree, pack.mask_block, scale), None
        return self._original(module, query, key, value, attention_mask, **kwargs)


@contextmanager
def install_tree_attention() -> Iterator[TreeAttention]:
    """Within this block, transformers' "sdpa" attention is the `TreeAttention` that the block receives.

    transformers looks attention functions up by name, in one table of the process. The entry is replaced once for a
    whole pass, and is put back however the block ends. Of torch's kernels those are used that take any lengths.
    """
    original = ALL_ATTENTION_FUNCTIONS[_SDPA]
    attention = TreeAttention(original)
    ALL_ATTENTION_FUNCTIONS[_SDPA] = attention
    try:
        with sdpa_kernel(_KERNELS):
            yield attention
    finally:
        ALL_ATTENTION_FUNCTIONS[_SDPA] = original


class _Pack:
    """The pack that is being computed: its mask, its tree and its scored positions."""

    def __init__(self, ends: Ids, rows: Tensor, mask: Tensor, seen: int, last_layer: int) -> None:
        self.mask, self.rows, self._ends = mask, rows, ends
        self.n_tokens, self.last_layer, self._seen = len(ends), last_layer, seen

        @cache  # every layer needs the same blocks
        def mask_block(row: int, last_row: int, column: int, last_column: int) -> Tensor:
            return mask[..., row:last_row, column:last_column].contiguous()

        self.mask_block = mask_block

    @cached_property
    def tree(self) -> Branch:
        return build_branches(self._ends)

    def is_mask(self, attention_mask: Tensor | None, query: Tensor, key: Tensor) -> bool:
        n = self.n_tokens
        return attention_mask is self.mask and query.shape[-2] == n and key.shape[-2] == self._seen + n


def _attend_at_rows(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, rows: Tensor, scale: float | None
) -> Tensor:
    """Return the attention output at `rows`, and 0 at all other positions."""
    out = query.new_zeros((1, query.shape[2], query.shape[1], value.shape[-1]))
    if len(rows):
        picked = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, rows], key, value, attn_mask=mask[:, :, rows], scale=scale
        )
        out[:, rows] = picked.transpose(1, 2)
    return out


def _attend_per_branch(
    query: Tensor, key: Tensor, value: Tensor, tree: Branch, mask_block: Callable[..., Tensor], scale: float | None
) -> Tensor:
    """Return the attention output, computed in two parts per branch: its shared stem, and what comes after the stem.

    All rows that see a stem attend to it in one call. The softmax over two sets of keys is the mean of the softmaxes
    over each set, weighted by their normalisers. PyTorch's public function does not return the normalisers; the
    operation behind it on a CPU does.
    """
    work = _PerBranch(query, key, value, mask_block, scale)
    work.attend(tree, 0)
    return work.out.transpose(1, 2).contiguous()


class _PerBranch:
    """Writes `out`. A function within another that calls itself would be a cycle, which keeps tensors for long."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, mask_block: Callable[..., Tensor], scale: float | None
    ) -> None:
        self.query, self.key, self.value = query, key, value
        self.mask_block, self.scale = mask_block, scale
        self.seen = key.shape[2] - query.shape[2]
        self.out, self.normaliser = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)

    def attend(self, branch: Branch, first: int) -> None:
        """Write what the branch's rows get from the keys from `first` on."""
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        query, out, normaliser = self.query, self.out, self.normaliser
        stem, below = slice(branch.begin, branch.stem), slice(branch.stem, branch.stop)
        last = self.seen + branch.stem
        keys, values = self.key[:, :, first:last], self.value[:, :, first:last]
        if branch.begin < branch.stem:
            mask = self.mask_block(branch.begin, branch.stem, first, last)
            out[:, :, stem], normaliser[:, :, stem] = attention(
                query[:, :, stem], keys, values, attn_mask=mask, scale=self.scale
            )
        for child in branch.children:
            self.attend(child, self.seen + child.begin)
        if branch.children and first < last:
            to_stem, stem_normaliser = attention(query[:, :, below], keys, values, scale=self.scale)
            weight = torch.sigmoid(stem_normaliser - normaliser[:, :, below])[..., None].to(out.dtype)
            out[:, :, below] = torch.lerp(out[:, :, below], to_stem, weight)
            normaliser[:, :, below] = torch.logaddexp(normaliser[:, :, below], stem_normaliser)
