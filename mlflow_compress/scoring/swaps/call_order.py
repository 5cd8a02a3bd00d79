"""In which order the modules of a model's body are called, and what there is to keep between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mlflow_compress.scoring.forward.body import Body
from mlflow_compress.scoring.plan.units import PaddedBatch

_TOKENS = 4


@dataclass(frozen=True)
class Border:
    """A place in the model's order of computation: everything before it is as in the baseline.

    Attributes
    ----------
    layers : int
        Decoder layers that are finished there.
    parts : tuple of str
        Parts of the next layer that are finished too, such as "self_attn".
    tail : (str, str) or None
        A part of the next layer of which only its last module is left to compute, and this module:
        ("mlp", "down_proj").
    """

    layers: int
    parts: tuple[str, ...] = ()
    tail: tuple[str, str] | None = None


@dataclass
class _Call:
    begin: int
    end: int = -1
    inputs: Any = None
    output: Any = None


@dataclass(frozen=True)
class CallOrder:
    """What one short pass has shown.

    Attributes
    ----------
    layers : str
        Name of the list of decoder layers.
    parts : tuple of tuple of str
        By layer, its direct parts that hold matrices: ("self_attn", "mlp").
    tails : mapping of (int, str) to str
        By layer and part, the module whose output is the part's output.
    width : float
        Values per token that are kept at all borders together.
    layer_width : float
        Values per token of one layer's output.
    """

    layers: str
    parts: tuple[tuple[str, ...], ...]
    tails: Mapping[tuple[int, str], str]
    width: float
    layer_width: float
    _calls: Mapping[str, _Call] = field(repr=False)

    def border(self, modules: Sequence[str]) -> Border:
        """Return the last border before all of these modules."""
        begin = min(self._begin(name) for name in modules) if modules else 0.0
        done = sum(self._end(f"{self.layers}.{number}") < begin for number in range(len(self.parts)))
        if done == len(self.parts):
            return Border(done)
        layer = f"{self.layers}.{done}"
        parts = tuple(part for part in self.parts[done] if self._end(f"{layer}.{part}") < begin)
        for part in self.parts[done]:
            leaf = self.tails.get((done, part))
            if leaf is not None and self._begin(f"{layer}.{part}.{leaf}") == begin:
                return Border(done, parts, (part, leaf))
        return Border(done, parts)

    def _end(self, name: str) -> float:
        return self._calls[name].end if name in self._calls else math.inf

    def _begin(self, name: str) -> float:
        """Return when a module begins. One that was not called begins with what it is part of; a head never."""
        inside = [c.begin for other, c in self._calls.items() if other == name or other.startswith(f"{name}.")]
        if inside:
            return min(inside)
        parent = name.rpartition(".")[0]
        return self._begin(parent) if parent else math.inf


def call_order(body: Body, layers: str, n_layers: int) -> CallOrder:
    """Return the order in which a body's modules are called, from a pass over a few tokens."""
    calls: dict[str, _Call] = {}
    clock = iter(range(1 << 30))
    with ExitStack() as hooks:
        for name, module in body.model.named_modules():
            if name:
                hooks.enter_context(_noted(name, module, calls, clock))
        body.run(PaddedBatch([np.arange(_TOKENS, dtype=np.int32)], [np.arange(_TOKENS)]))
    parts, tails, width = [], {}, 0.0
    for number in range(n_layers):
        layer = f"{layers}.{number}"
        held = tuple(
            name
            for name, module in body.model.get_submodule(layer).named_children()
            if any(p.ndim > 1 for p in module.parameters()) and f"{layer}.{name}" in calls
        )
        parts.append(held)
        width += _width(calls[layer].output)
        for part in held:
            width += _width(calls[f"{layer}.{part}"].output)
            if (leaf := _tail(calls, f"{layer}.{part}")) is not None:
                tails[number, part] = leaf
                width += _width(calls[f"{layer}.{part}.{leaf}"].inputs)
    layer_width = _width(calls[f"{layers}.0"].output)
    return CallOrder(layers, tuple(parts), tails, width, layer_width, calls)


def first_tensor(value: Any) -> torch.Tensor | None:
    """Return a tensor, or the first member of a tuple of which it is one."""
    if isinstance(value, tuple | list) and value:
        value = value[0]
    return value if isinstance(value, torch.Tensor) else None


def _width(value: Any) -> float:
    tensor = first_tensor(value)
    return 0.0 if tensor is None else tensor.numel() / _TOKENS


def _tail(calls: Mapping[str, _Call], part: str) -> str | None:
    """Return the innermost module in a part whose output is the part's output; None where something follows it."""
    output = first_tensor(calls[part].output)
    for name in reversed(list(calls)):
        last = first_tensor(calls[name].output)
        if name.startswith(f"{part}.") and last is not None and output is not None:
            same = last.data_ptr() == output.data_ptr() and last.shape == output.shape
            if same and len(calls[name].inputs) == 1:
                return str(name.removeprefix(f"{part}."))
    return None


@contextmanager
def _noted(name: str, module: torch.nn.Module, calls: dict[str, _Call], clock: Iterator[int]) -> Iterator[None]:
    def begins(_module: Any, inputs: Any) -> None:
        calls.setdefault(name, _Call(next(clock), inputs=inputs))

    def ends(_module: Any, _inputs: Any, output: Any) -> None:
        calls[name].end, calls[name].output = next(clock), output

    handles = module.register_forward_pre_hook(begins), module.register_forward_hook(ends)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
