"""The weights of a model in groups, as serving engines fuse them: q/k/v, o, gate/up, down, all experts of a layer."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from mlflow_compress.errors import DataError, UnsupportedError

EMBEDDINGS, _HEAD, EXPERTS, _NORM = "embeddings", "head", "experts", "norm"

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
    """Modules that are swapped together."""

    name: str  # "layers.3.qkv", "embeddings", "head"
    # "qkv", "o", "gate_up", "down", "experts", "embeddings", "head", "norm"; the module's own name where it is none of
    # these ("router"); several joined by "+"
    kind: str
    layer: int | None  # Number of the decoder layer; None outside of them
    modules: tuple[str, ...]  # Names in `model.named_modules()`

    def joined(self, other: "WeightGroup") -> "WeightGroup":
        """Return one group of both; norms do not change its name."""
        first, second = (self, other) if self.kind != _NORM else (other, self)
        modules = first.modules + tuple(name for name in second.modules if name not in first.modules)
        if second.kind == _NORM:
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
    """
    layers = decoder_layers(model)
    groups: dict[str, WeightGroup] = {}
    for name in _swap_units(model):
        group = _group_of(model, name, layers[0] if layers else None)
        there = groups.get(group.name)
        groups[group.name] = group if there is None else replace(there, modules=(*there.modules, name))
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and head.weight is embeddings.weight:
        first, second = (
            next(group for group in groups.values() if any(model.get_submodule(n) is end for n in group.modules))
            for end in (embeddings, head)
        )
        groups = {k: g for k, g in groups.items() if g is not second}
        groups[first.name] = first.joined(second)
    return list(groups.values())


def _swap_units(model: Any) -> Iterator[str]:
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


def _group_of(model: Any, name: str, layers: str | None) -> WeightGroup:
    """Return the group that a module alone would be; modules whose groups have one name belong together."""
    module = model.get_submodule(name)
    leaf = name.rpartition(".")[2]
    inner = name.removeprefix(f"{layers}.") if layers is not None else name
    is_flat = all(parameter.ndim < 2 for parameter in module.parameters())
    if layers is None or inner == name:
        if module is model.get_output_embeddings():
            return WeightGroup(_HEAD, _HEAD, None, (name,))
        if isinstance(module, torch.nn.Embedding):
            return WeightGroup(EMBEDDINGS, EMBEDDINGS, None, (name,))
        return WeightGroup(name, _NORM if is_flat else leaf, None, (name,))
    number, _, path = inner.partition(".")
    if is_flat:
        return WeightGroup(f"layers.{number}.{path}", _NORM, int(number), (name,))
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


Tensor = torch.Tensor
_PAIRS = (("v_proj", "o_proj"), ("up_proj", "down_proj"), ("w3", "w2"), ("fc1", "fc2"))
_SAME_MATRIX = 0.3
_FIX = "Evaluate it as a whole instead (mlflow-compress evaluate)"


@dataclass(frozen=True)
class Differences:
    """Where a variant differs from its baseline."""

    groups: list[WeightGroup]  # In the model's order. Every module that differs is in one of them.
    unchanged: list[WeightGroup]  # Groups whose weights are the baseline's
    # By linear layer, the factors of its rows and of its columns that undo moved scales: with them the variant's weight
    # is a rounded version of the baseline's
    moved_scales: Mapping[str, tuple[Tensor | None, Tensor | None]]


def find_differences(baseline: Any, variant: Any) -> Differences:
    """Return the groups of weights in which two models differ.

    Both are in eval mode, in one dtype, on one device.
    """
    _require_same_architecture(baseline, variant)
    changed = {name for name in _swap_units(baseline) if _differs(baseline, variant, name)}
    if not changed:
        raise DataError("There is nothing to diagnose: every weight of the variant is the baseline's")
    groups = weight_groups(baseline)
    scales = _MovedScales(baseline, variant)
    links = [*scales.norms(changed), *scales.pairs(changed)]
    group_of = {name: group.name for group in groups for name in group.modules}
    joined = {group.name: group for group in groups}
    for first, second in links:
        a, b = group_of[first], group_of[second]
        if a == b:
            continue
        # A norm comes before its readers, and its group keeps their name.
        joined[a] = joined[a].joined(joined.pop(b)) if joined[a].kind != _NORM else joined.pop(b).joined(joined[a])
        for name in joined[a].modules:
            group_of[name] = a
    order = {name: place for place, name in enumerate(group_of)}
    parts = sorted(joined.values(), key=lambda group: order[group.modules[0]])
    differing = [group for group in parts if changed.intersection(group.modules)]
    differences = Differences(differing, [g for g in parts if g not in differing and g.kind != _NORM], scales.factors)
    for name in sorted(changed):
        _require_version(baseline, variant, name, differences)
    return differences


def restored_weight(variant: Any, name: str, differences: Differences) -> Tensor | None:
    """Return a layer's weight with moved scales moved back; None where it is not stored as floating-point numbers."""
    weight = _weight(variant, name)
    if weight is None or name not in differences.moved_scales:
        return weight
    rows, columns = differences.moved_scales[name]
    weight = weight if rows is None else weight * rows[:, None]
    return weight if columns is None else weight * columns[None, :]


def _require_same_architecture(baseline: Any, variant: Any) -> None:
    first, second = list(_swap_units(baseline)), list(_swap_units(variant))
    if type(baseline).__name__ != type(variant).__name__ or first != second:
        n_layers = [len(layers[1]) if (layers := decoder_layers(model)) else 0 for model in (baseline, variant)]
        raise UnsupportedError(
            "The variant has another architecture than its baseline, so their modules cannot be swapped",
            allowed=f"{type(baseline).__name__} with {n_layers[0]} layers and {len(first)} modules with weights",
            got=f"{type(variant).__name__} with {n_layers[1]} layers and {len(second)}",
            fix=_FIX,
        )
    attention = [
        m.config.get_text_config(decoder=True)._attn_implementation
        + (" with compressed-tensors' cache" if any(hasattr(part, "kv_cache") for part in m.modules()) else "")
        for m in (baseline, variant)
    ]
    if attention[0] != attention[1]:
        raise UnsupportedError(
            "The variant computes attention differently (rounded keys and values), which no module contains",
            allowed=attention[0],
            got=attention[1],
            fix=_FIX,
        )
    units = {id(p) for name in first for p in baseline.get_submodule(name).parameters()}
    beside = ((name, p) for name, p in baseline.named_parameters() if id(p) not in units)
    if loose := [name for name, p in beside if not torch.equal(p, variant.get_parameter(name))]:
        raise UnsupportedError(
            "The variant changes weights outside the modules that can be swapped",
            got=loose[0],
            fix=_FIX,
        )


def _differs(baseline: Any, variant: Any, name: str) -> bool:
    """Return whether a module has other weights, another class, or rounds its inputs."""
    first, second = baseline.get_submodule(name), variant.get_submodule(name)
    scheme = getattr(second, "quantization_scheme", None)  # of compressed-tensors
    if type(first) is not type(second) or getattr(scheme, "input_activations", None) is not None:
        return True
    old, new = first.state_dict(), second.state_dict()  # the new one may hold scales beside the weight
    return any(key not in new or not torch.equal(value, new[key]) for key, value in old.items())


def _weight(model: Any, name: str) -> Tensor | None:
    """Return a module's matrix in float32; None where it has none of plain floating-point numbers."""
    weight = getattr(model.get_submodule(name), "weight", None)
    if weight is None or weight.ndim != 2 or not weight.is_floating_point() or type(weight.data) is not Tensor:
        return None
    matrix: Tensor = weight.data.float()
    return matrix


class _MovedScales:
    """Finds scales that were moved between neighbours, and the factors that undo it."""

    def __init__(self, baseline: Any, variant: Any) -> None:
        self._baseline, self._variant = baseline, variant
        self.factors: dict[str, tuple[Tensor | None, Tensor | None]] = {}

    def norms(self, changed: set[str]) -> Iterator[tuple[str, str]]:
        """Iterate over changed norms and the modules that read them."""
        readers = _readers(self._baseline)
        for norm in [name for name in readers if name in changed]:
            ratio = self._ratio(norm)
            for reader in readers[norm]:
                if isinstance(self._baseline.get_submodule(reader), torch.nn.Linear):
                    self._multiply(reader, columns=ratio)
                yield norm, reader

    def pairs(self, changed: set[str]) -> Iterator[tuple[str, str]]:
        """Iterate over pairs of layers of which one has the inverse scales of the other.

        A row of the first is compared with the baseline's by least squares, and so is the column of the second that
        reads it. Rounding and pruning change both at random. A moved scale changes both, one up and the other down:
        the logarithms are anticorrelated (-0.99 in AWQ's demo, between -0.17 and 0.13 in rounded ones). A pair that is
        taken together without need is right too, only coarser.
        """
        for first in sorted(changed):
            parent, _, leaf = first.rpartition(".")
            second = next((f"{parent}.{b}" for a, b in _PAIRS if a == leaf and f"{parent}.{b}" in changed), None)
            if second is None or (scale := self._pair_scale(first, second)) is None:
                continue
            rows, columns = scale
            self._multiply(first, rows=1 / rows)
            self._multiply(second, columns=columns)
            yield first, second

    def _pair_scale(self, first: str, second: str) -> tuple[Tensor, Tensor] | None:
        a, b = (restored_weight(self._variant, n, Differences([], [], self.factors)) for n in (first, second))
        old_a, old_b = (_weight(self._baseline, n) for n in (first, second))
        if a is None or b is None or old_a is None or old_b is None or a.shape != old_a.shape:
            return None
        rows, columns = _least_squares(a, old_a, 1), _least_squares(b, old_b, 0)
        place = self._place(len(rows), len(columns))
        if place is None:
            return None
        seen, used = rows[place], old_a.any(1)[place] & old_b.any(0)
        usable = used & (seen > 0) & (columns > 0)  # a moved scale is positive, however small
        x, y = (t[usable].log().cpu().numpy() for t in (seen, columns))
        if len(x) < 3 or x.std() == 0 or y.std() == 0:
            return None
        if np.corrcoef(x, y)[0, 1] > -np.clip(4 / math.sqrt(len(x)), 0.3, 0.8):  # 4 standard errors
            return None
        one = torch.ones_like(columns)
        # What a row of zeros cannot show, the column that reads it does.
        factors = torch.where(usable, seen, torch.where(columns > 0, 1 / columns, one))
        return torch.where(rows > 0, rows, torch.ones_like(rows)), factors

    def _place(self, n_rows: int, n_columns: int) -> Tensor | None:
        """Return, for every column of the second layer, the row of the first: heads of v may be shared (GQA)."""
        if n_rows == n_columns:
            return torch.arange(n_rows)
        config = self._baseline.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None)
        if not heads or n_rows % heads or n_columns % n_rows:
            return None
        return torch.arange(n_rows).reshape(heads, 1, -1).expand(-1, n_columns // n_rows, -1).reshape(-1)

    def _ratio(self, norm: str) -> Tensor:
        """Return a norm's scale in the variant over that in the baseline, per channel, whatever the norm's formula.

        Both norms are linear in the normalised input, so their responses to a difference of two inputs are in this
        ratio.
        """
        old, new = self._baseline.get_submodule(norm), self._variant.get_submodule(norm)
        parameter = next(old.parameters())
        random = torch.Generator().manual_seed(0)
        x = torch.randn((16, parameter.shape[-1]), generator=random).to(parameter)
        with torch.inference_mode():
            a, b = (m(x[:8]).float() - m(x[8:]).float() for m in (old, new))
        return _least_squares(b, a, 0)

    def _multiply(self, name: str, *, rows: Tensor | None = None, columns: Tensor | None = None) -> None:
        before = self.factors.get(name, (None, None))
        both = (rows, columns)
        self.factors[name] = tuple(  # type: ignore[assignment]
            new if old is None else old if new is None else old * new for old, new in zip(before, both, strict=True)
        )


def _least_squares(new: Tensor, old: Tensor, axis: int) -> Tensor:
    """Return the c that minimise ``|new - c old|²`` along an axis; 1 where `old` is 0."""
    square = old.square().sum(axis)
    ratio: Tensor = torch.where(square > 0, (new * old).sum(axis) / square.clamp_min(1e-30), torch.ones_like(square))
    return ratio


def _readers(model: Any) -> dict[str, list[str]]:
    """Return, by norm, the modules whose input is its output, from a short pass."""
    outputs: dict[int, tuple[str, Tensor]] = {}
    readers: dict[str, list[str]] = {}

    def called(name: str, _module: Any, inputs: Any, output: Any) -> None:
        read = next((value for value in inputs if isinstance(value, Tensor)), None)
        if read is not None and (source := outputs.get(read.data_ptr())) and source[1].numel() == read.numel():
            readers[source[0]].append(name)
        if name in readers and isinstance(output, Tensor):
            outputs[output.data_ptr()] = (name, output)  # kept alive, so that no other tensor gets its address

    with ExitStack() as hooks, torch.inference_mode():
        for name in _swap_units(model):
            module = model.get_submodule(name)
            if all(parameter.ndim < 2 for parameter in module.parameters()):
                readers[name] = []
            hooks.callback(module.register_forward_hook(partial(called, name)).remove)
        model(input_ids=torch.arange(4, device=model.get_input_embeddings().weight.device)[None], use_cache=False)
    return readers


def _require_version(baseline: Any, variant: Any, name: str, differences: Differences) -> None:
    """Refuse a matrix that has nothing in common with the baseline's: it was rotated, or is of another model."""
    old, new = _weight(baseline, name), restored_weight(variant, name, differences)
    if old is None or new is None or not bool(new.any()):
        return
    if old.shape != new.shape:
        raise UnsupportedError("A matrix of the variant has another shape", got=name, fix=_FIX)
    cosine = float((old * new).sum() / (old.norm() * new.norm()).clamp_min(1e-30))
    if cosine < _SAME_MATRIX:
        raise UnsupportedError(
            f"{name} cannot be compared with the baseline's matrix: it was rotated, or is another model's",
            allowed=f"a cosine of {_SAME_MATRIX} or more between both",
            got=f"{cosine:.3f}",
            fix=_FIX,
        )
