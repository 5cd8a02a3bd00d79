"""A baseline's outputs of one batch, kept at the borders of its layers: what lies before a swap is not computed again.

A kept output is returned by the layer itself, whose `forward` is replaced for the time of one pass. So the model's own
code runs: masks, positions and whatever else its body does between the layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any

import numpy as np
import torch

from mlflow_compress.errors import ConfigError
from mlflow_compress.models.weight_groups import decoder_layers
from mlflow_compress.scoring.forward.body import Body
from mlflow_compress.scoring.plan.units import PaddedBatch

_TOKENS = 4


@dataclass(frozen=True)
class Border:
    """A place in the model's order of computation: everything before it is as in the baseline."""

    layers: int  # Decoder layers that are finished there
    parts: tuple[str, ...] = ()  # Parts of the next layer that are finished too, such as "self_attn"
    # A part of the next layer of which only its last module is left to compute, and this module: ("mlp", "down_proj")
    tail: tuple[str, str] | None = None


@dataclass
class _Call:
    begin: int
    end: int = -1
    inputs: Any = None
    output: Any = None


@dataclass(frozen=True)
class CallOrder:
    """What one short pass has shown."""

    layers: str  # Name of the list of decoder layers
    parts: tuple[tuple[str, ...], ...]  # By layer, its direct parts that hold matrices: ("self_attn", "mlp")
    tails: Mapping[tuple[int, str], str]  # By layer and part, the module whose output is the part's output
    width: float  # Values per token that are kept at all borders together
    layer_width: float  # Values per token of one layer's output
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


Tensor = torch.Tensor
_CANNOT = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError)


class KeptOutputs:
    """Keeps the outputs of a baseline's layers for one batch, and runs the batch again from any border between them.

    `longest` is the tokens of the largest batch, with padding. Where `max_bytes` have room, the outputs of every layer
    and of its parts are kept (`inside`), and the inputs of the last module of each part; else the output of every
    layer; else of every k-th layer (`every`), from which the layers up to a swap are computed again.
    `whole_model_reason` says why every pass computes all layers; None where it need not.

    Raises `ConfigError`: not even one layer's output fits.
    """

    def __init__(self, body: Body, longest: int, max_bytes: int) -> None:
        self._body = body
        self._kept: dict[tuple[int, str], Any] = {}
        self._layers = torch.nn.ModuleList()
        self.every, self.inside = 1, True
        self.whole_model_reason: str | None = None
        found = decoder_layers(body.model)
        if found is None:
            self.whole_model_reason = "its decoder layers were not found"
            return
        name, self._layers = found
        try:
            self._order = call_order(body, name, len(self._layers))
            self.whole_model_reason = self._check()
        except _CANNOT as error:
            self.whole_model_reason = f"its layers cannot be run one by one ({type(error).__name__}: {error})"
        if self.whole_model_reason is None:
            self._fit(longest * body.model.dtype.itemsize, max_bytes)

    def _fit(self, bytes_per_width: int, max_bytes: int) -> None:
        one = self._order.layer_width * bytes_per_width
        if one > max_bytes:
            raise ConfigError(
                "The memory for kept states does not hold the output of one layer",
                allowed=f"{one / 2**30:.3g} GiB or more",
                got=f"{max_bytes / 2**30:.3g} GiB",
            )
        self.inside = self._order.width * bytes_per_width <= max_bytes
        self.every = ceil(len(self._layers) / (max_bytes // one))

    @property
    def n_layers(self) -> int:
        """Number of decoder layers."""
        return len(self._layers)

    def border(self, modules: Sequence[str]) -> Border:
        """Return the last border before all of these modules."""
        return Border(0) if self.whole_model_reason is not None else self._order.border(modules)

    def compute(self, unit: PaddedBatch) -> Tensor:
        """Run the whole batch, keep what is passed, and return the head's inputs."""
        # What is kept of the last batch is replaced piece by piece: memory that is freed at once is slow to come back.
        if self.whole_model_reason is not None:
            return self._body.run(unit)
        with ExitStack() as hooks:
            for number, layer in enumerate(self._layers):
                if (number + 1) % self.every == 0 or number + 1 == len(self._layers):
                    hooks.enter_context(self._keeping(layer, (number, "")))
                for part in self._order.parts[number] if self.inside else ():
                    hooks.enter_context(self._keeping(layer.get_submodule(part), (number, part)))
                    if leaf := self._order.tails.get((number, part)):
                        path = f"{part}.{leaf}"
                        hooks.enter_context(self._keeping(layer.get_submodule(path), (number, path), inputs=True))
            return self._body.run(unit)

    def run_from(self, border: Border, unit: PaddedBatch) -> Tensor:
        """Run the batch of the last `compute` again from a border, and return the head's inputs."""
        done = border.layers if border.layers == len(self._layers) else border.layers // self.every * self.every
        with ExitStack() as replaced:
            for layer in self._layers[:done]:
                replaced.enter_context(_answers(layer, lambda: self._kept[done - 1, ""]))
            if self.inside and done == border.layers < len(self._layers):
                for part in border.parts:
                    module = self._layers[done].get_submodule(part)
                    replaced.enter_context(_answers(module, partial(self._kept.__getitem__, (done, part))))
                if border.tail is not None:
                    module = self._layers[done].get_submodule(border.tail[0])
                    replaced.enter_context(_answers(module, partial(self._tail, module, done, *border.tail)))
            return self._body.run(unit)

    def forget(self) -> None:
        """Free what is kept."""
        self._kept.clear()

    def _tail(self, module: torch.nn.Module, number: int, part: str, leaf: str) -> Any:
        """Return what a part returns when only its last module is computed, on its kept input."""
        before = self._kept[number, part]
        computed = module.get_submodule(leaf)(*self._kept[number, f"{part}.{leaf}"])
        return (computed, *before[1:]) if isinstance(before, tuple) else computed

    def _keeping(
        self, module: torch.nn.Module, key: tuple[int, str], *, inputs: bool = False
    ) -> AbstractContextManager[None]:
        def keep(_module: Any, given: Any, output: Any) -> None:
            # Of a tuple only the states: attention weights would grow with the square of the length.
            states = (output[0], *(None for _ in output[1:])) if isinstance(output, tuple) else output
            self._kept[key] = given if inputs else states

        return _hooked(module, keep)

    def _check(self) -> str | None:
        """Return why passes from a border differ from whole ones; None where they give the same bits."""
        vocab_size = int(self._body.model.config.get_text_config(decoder=True).vocab_size)
        ids = np.random.default_rng(3).integers(0, vocab_size, size=16).astype(np.int32)
        unit = PaddedBatch([ids], [np.arange(len(ids))])
        whole = self.compute(unit)
        borders = [Border(number) for number in range(len(self._layers) + 1)]
        for number, parts in enumerate(self._order.parts):
            for done, part in enumerate(parts):
                leaf = self._order.tails.get((number, part))
                borders.append(Border(number, parts[:done], (part, leaf) if leaf is not None else None))
        for border in borders:
            if not torch.equal(self.run_from(border, unit), whole):
                return f"from layer {border.layers} on it computes something else than as a whole"
        self.forget()
        return None


@contextmanager
def _hooked(module: torch.nn.Module, keep: Callable[[Any, Any, Any], None]) -> Iterator[None]:
    handle = module.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _answers(module: torch.nn.Module, answer: Callable[[], Any]) -> Iterator[None]:
    """Within this block the module returns an answer, whatever it is given."""
    before = vars(module).get("forward")  # accelerate's hooks are such functions
    module.forward = lambda *_args, **_kwargs: answer()
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
