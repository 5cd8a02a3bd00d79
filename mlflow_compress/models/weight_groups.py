"""The weights of a model in groups, as serving engines fuse them: q/k/v, o, gate/up, down, all experts of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

EMBEDDINGS, HEAD, EXPERTS, NORM = "embeddings", "head", "experts", "norm"

_KINDS = {
    "qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv"),
    "o": ("o_proj", "out_proj", "dense"),
    "gate_up": ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "fc1", "fc_in", "c_fc", "dense_h_to_4h"),
    "down": ("down_proj", "w2", "fc2", "fc_out", "dense_4h_to_h"),
}
_KIND_OF = {leaf: kind for kind, leaves in _KINDS.items() for leaf in leaves}
_ATTENTION = ("attn", "attention")


@dataclass(frozen=True)
class WeightGroup:
    """Modules that are swapped together.

    Attributes
    ----------
    name : str
        "layers.3.qkv", "embeddings", "head".
    kind : str
        "qkv", "o", "gate_up", "down", "experts", "embeddings", "head", "norm"; the module's own name where it is none
        of these ("router"); several joined by "+".
    layer : int or None
        Number of the decoder layer; None outside of them.
    modules : tuple of str
        Names in `model.named_modules()`.
    """

    name: str
    kind: str
    layer: int | None
    modules: tuple[str, ...]

    def joined(self, other: WeightGroup) -> WeightGroup:
        """Return one group of both; norms do not change its name."""
        first, second = (self, other) if self.kind != NORM else (other, self)
        modules = first.modules + tuple(name for name in second.modules if name not in first.modules)
        if second.kind == NORM:
            return replace(first, modules=modules)
        kinds = first.kind.split("+")
        kinds += [kind for kind in second.kind.split("+") if kind not in kinds]
        layer = first.layer if first.layer == second.layer else None
        name = f"{first.name}+{second.kind if layer is not None else second.name}"
        return WeightGroup(name, "+".join(kinds), layer, modules)


def decoder_layers(model: Any) -> tuple[str, torch.nn.ModuleList] | None:
    """Return the name and the list of a causal LM's decoder layers; None where there is no such list."""
    n_layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    lists = ((name, m) for name, m in model.named_modules() if isinstance(m, torch.nn.ModuleList))
    return next(((name, m) for name, m in lists if len(m) == n_layers), None)


def weight_groups(model: Any) -> list[WeightGroup]:
    """Return every module that has weights of its own, in the finest groups, in the model's order.

    The linear layers that serving engines fuse are one group. Every norm, and whatever else has weights, is a group of
    its own. Tied embeddings and head are one group.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal LM.
    """
    layers = decoder_layers(model)
    groups: dict[str, WeightGroup] = {}
    for name in swap_units(model):
        group = _group_of(model, name, layers[0] if layers else None)
        there = groups.get(group.name)
        groups[group.name] = group if there is None else replace(there, modules=(*there.modules, name))
    if (tied := tied_groups(model, list(groups.values()))) is not None:
        first, second = tied
        groups = {k: g for k, g in groups.items() if g is not second}
        groups[first.name] = first.joined(second)
    return list(groups.values())


def swap_units(model: Any) -> Iterator[str]:
    """Iterate over the names of the smallest modules that have weights; all experts of a layer are one."""
    inside = ""
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if name.rpartition(".")[2] == EXPERTS and any(True for _ in module.parameters()):
            inside = f"{name}."
            yield name
        elif any(True for _ in module.parameters(recurse=False)) and not any(True for _ in module.children()):
            yield name


def tied_groups(model: Any, groups: list[WeightGroup]) -> tuple[WeightGroup, WeightGroup] | None:
    """Return the groups of the input and the output embeddings if they share their weight."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not embeddings.weight:
        return None
    owners = [
        next(g for g in groups if any(model.get_submodule(n) is m for n in g.modules)) for m in (embeddings, head)
    ]
    return owners[0], owners[1]


def _group_of(model: Any, name: str, layers: str | None) -> WeightGroup:
    """Return the group that a module alone would be; modules whose groups have one name belong together."""
    module = model.get_submodule(name)
    leaf = name.rpartition(".")[2]
    inner = name.removeprefix(f"{layers}.") if layers is not None else name
    is_flat = all(parameter.ndim < 2 for parameter in module.parameters())
    if layers is None or inner == name:
        if module is model.get_output_embeddings():
            return WeightGroup(HEAD, HEAD, None, (name,))
        if isinstance(module, torch.nn.Embedding):
            return WeightGroup(EMBEDDINGS, EMBEDDINGS, None, (name,))
        return WeightGroup(name, NORM if is_flat else leaf, None, (name,))
    number, _, path = inner.partition(".")
    if is_flat:
        return WeightGroup(f"layers.{number}.{path}", NORM, int(number), (name,))
    kind = EXPERTS if leaf == EXPERTS else _kind(path)
    shared = "shared_" if "shared" in path else ""  # the experts that every token passes
    return WeightGroup(f"layers.{number}.{shared}{kind}", f"{shared}{kind}", int(number), (name,))


def _kind(path: str) -> str:
    """Return the kind of a matrix by its path in the layer: its own name, where serving engines fuse it with none."""
    parent, _, leaf = path.rpartition(".")
    in_attention = any(word in parent.lower() for word in _ATTENTION)
    if leaf == "c_proj":  # GPT-2 has one in attention and one in the MLP
        return "o" if in_attention else "down"
    return _KIND_OF.get(leaf, leaf)
