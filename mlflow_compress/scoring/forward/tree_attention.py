"""Attention over a pack without what nobody reads: between branches that do not see each other, and in the last layer
at positions that are not scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mlflow_compress.scoring.plan.trie import Ids
from mlflow_compress.scoring.plan.units import PackedBatch

Tensor = torch.Tensor
_SMALLEST = 32  # tokens; a call costs as much as what smaller branches would save
_SDPA = "sdpa"


@dataclass(frozen=True)
class Branch:
    """The tokens `begin` .. `stop` - 1 of a pack: of it they see nothing but each other and what lies above.

    Attributes
    ----------
    begin, stop : int
    stem : int
        The tokens before this one are seen by all that follow.
    parts : list of Branch
        What follows the stem; they see nothing of each other. Empty where one call is as fast, and `stem` is `stop`.
    """

    begin: int
    stem: int
    stop: int
    parts: list[Branch]


def branches(ends: Ids, begin: int = 0, stop: int | None = None) -> Branch:
    """Return a pack's tokens as a tree, small neighbours together; `ends` as in `PackedBatch`."""
    stop = len(ends) if stop is None else stop
    apart = ends[begin:stop] < stop
    stem = begin + int(apart.argmax()) if apart.any() else stop
    reach = np.concatenate([[stem], np.maximum.accumulate(ends[stem:stop])])[:-1]
    cuts = [stem]
    for start in (stem + np.flatnonzero(reach <= np.arange(stem, stop))).tolist():
        if start - cuts[-1] >= _SMALLEST:
            cuts.append(start)
    if len(cuts) == 1:
        return Branch(begin, stop, stop, [])
    return Branch(begin, stem, stop, [branches(ends, a, b) for a, b in zip(cuts, [*cuts[1:], stop], strict=True)])


@contextmanager
def tree_attention(unit: PackedBatch, mask: Tensor | None, seen: int, last_layer: int) -> Iterator[None]:
    """Within this block, models with PyTorch's scaled dot-product attention compute what is needed only.

    Parameters
    ----------
    unit : PackedBatch
    mask : Tensor, shape (1, 1, q, seen + q), or None
        What the model is given as its attention mask; the `seen` cached tokens are visible to all. Calls with another
        mask are not changed.
    seen : int
    last_layer : int
        Its number: there only the scored rows are right, the others 0.
    """
    whole = ALL_ATTENTION_FUNCTIONS[_SDPA]
    tree, rows = branches(unit.ends), torch.from_numpy(unit.rows)

    @cache  # every layer needs the same ones
    def part(row: int, last_row: int, column: int, last_column: int) -> Tensor:
        assert mask is not None
        return mask[..., row:last_row, column:last_column].contiguous()

    def attend(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        known = attention_mask is mask and query.shape[-2] == len(unit.ids) and key.shape[-2] == seen + len(unit.ids)
        if known and kwargs.get("position_bias") is None and mask is not None:
            at_rows = getattr(module, "layer_idx", None) == last_layer and 4 * len(rows) <= len(unit.ids)
            if at_rows or (tree.parts and query.device.type == "cpu" and key.shape[-1] == value.shape[-1]):
                groups = query.shape[1] // key.shape[1]
                key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
                scale = kwargs.get("scaling")
                if at_rows:
                    return _at_rows(query, key, value, mask, rows.to(query.device), scale), None
                return _by_branches(query, key, value, tree, part, scale), None
        found: tuple[Tensor, Any] = whole(module, query, key, value, attention_mask, **kwargs)
        return found

    ALL_ATTENTION_FUNCTIONS[_SDPA] = attend
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[_SDPA] = whole


def _at_rows(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, rows: Tensor, scale: float | None) -> Tensor:
    out = query.new_zeros((1, query.shape[2], query.shape[1], value.shape[-1]))
    if len(rows):
        picked = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, rows], key, value, attn_mask=mask[:, :, rows], scale=scale
        )
        out[:, rows] = picked.transpose(1, 2)
    return out


def _by_branches(
    query: Tensor, key: Tensor, value: Tensor, tree: Branch, mask: Callable[..., Tensor], scale: float | None
) -> Tensor:
    """Attend to shared tokens with all rows that see them together, to the rest branch by branch, and join the two.

    A softmax over two sets of keys is the mean of the softmaxes over each, weighted by their normalisers. PyTorch's
    public function does not return these; the operation behind it on a CPU does.
    """
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    seen = key.shape[2] - query.shape[2]
    out, normaliser = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)

    def attend(branch: Branch, first: int) -> None:
        """Write what the branch's rows get from the keys `first` and later."""
        stem, below = slice(branch.begin, branch.stem), slice(branch.stem, branch.stop)
        last = seen + branch.stem
        keys, values = key[:, :, first:last], value[:, :, first:last]
        if branch.begin < branch.stem:
            own = mask(branch.begin, branch.stem, first, last)
            out[:, :, stem], normaliser[:, :, stem] = attention(
                query[:, :, stem], keys, values, attn_mask=own, scale=scale
            )
        for part in branch.parts:
            attend(part, seen + part.begin)
        if branch.parts and first < last:
            to_shared, shared = attention(query[:, :, below], keys, values, scale=scale)
            weight = torch.sigmoid(shared - normaliser[:, :, below])[..., None].to(out.dtype)
            out[:, :, below] = torch.lerp(out[:, :, below], to_shared, weight)
            normaliser[:, :, below] = torch.logaddexp(normaliser[:, :, below], shared)

    attend(tree, 0)
    return out.transpose(1, 2).contiguous()
