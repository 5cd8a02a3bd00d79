"""A baseline's outputs of one batch, kept at the borders of its layers: what lies before a swap is not computed again.

A kept output is returned by the layer itself, whose `forward` is replaced for the time of one pass. So the model's own
code runs: masks, positions and whatever else its body does between the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch

from mlflow_compress.errors import ConfigError
from mlflow_compress.models.weight_groups import decoder_layers
from mlflow_compress.scoring.forward.body import Body
from mlflow_compress.scoring.plan.units import PaddedBatch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Border:
    """A place in the model's order of computation: everything before it is as in the baseline.

    Attributes
    ----------
    layers : int
        Decoder layers that are finished there.
    parts : tuple of str
        Parts of the next layer that are finished too, such as "self_attn".
    """

    layers: int
    parts: tuple[str, ...] = ()


class KeptOutputs:
    """Keeps the outputs of a baseline's layers for one batch, and runs the batch again from any border between them.

    Parameters
    ----------
    body : Body
        The baseline's.
    longest : int
        Tokens of the largest batch, with padding.
    max_bytes : int
        Most memory that the kept outputs may take. Where there is room, the output of every layer is kept, and that of
        its attention; else of every layer; else of every k-th layer, from which the layers up to a swap are computed
        again.

    Attributes
    ----------
    every : int
        k.
    parts : bool
        Whether outputs inside of layers are kept.
    whole_model_reason : str or None
        Why every pass computes all layers; None where it need not.

    Raises
    ------
    ConfigError
        Not even one layer's output fits.
    """

    def __init__(self, body: Body, longest: int, max_bytes: int) -> None:
        self._body = body
        found = decoder_layers(body.model)
        self._name, self._layers = found if found is not None else ("", torch.nn.ModuleList())
        self._order = _Order(body)
        self._children = [_parts_with_matrices(layer) for layer in self._layers]
        config = body.model.config.get_text_config(decoder=True)
        one = longest * int(config.hidden_size) * body.model.dtype.itemsize
        n, n_parts = len(self._layers), sum(map(len, self._children))
        if one > max_bytes:
            raise ConfigError(
                "The memory for kept states does not hold the output of one layer",
                allowed=f"{one / 2**30:.3g} GiB or more",
                got=f"{max_bytes / 2**30:.3g} GiB",
            )
        self.parts = (n + n_parts) * one <= max_bytes
        self.every = max(1, ceil(n * one / max_bytes))
        self._kept: dict[tuple[int, str], Any] = {}
        self.whole_model_reason: str | None = None
        self.whole_model_reason = "its decoder layers were not found" if found is None else self._check()

    @property
    def n_layers(self) -> int:
        """Number of decoder layers."""
        return len(self._layers)

    def border(self, modules: Sequence[str]) -> Border:
        """Return the last border before all of these modules."""
        if self.whole_model_reason is not None:
            return Border(0)
        return self._order.border(modules, self._name, self._children)

    def compute(self, unit: PaddedBatch) -> Tensor:
        """Run the whole batch, keep what is passed, and return the head's inputs."""
        self._kept.clear()
        if self.whole_model_reason is not None:
            return self._body.run(unit)
        with ExitStack() as hooks:
            for number, layer in enumerate(self._layers):
                if (number + 1) % self.every == 0 or number + 1 == len(self._layers):
                    hooks.enter_context(_hooked(layer, self._keeper((number, ""))))
                for name in self._children[number] if self.parts else ():
                    hooks.enter_context(_hooked(layer.get_submodule(name), self._keeper((number, name))))
            return self._body.run(unit)

    def run_from(self, border: Border, unit: PaddedBatch) -> Tensor:
        """Run the batch of the last `compute` again from a border, and return the head's inputs."""
        done = border.layers if border.layers == len(self._layers) else border.layers // self.every * self.every
        with ExitStack() as replaced:
            for layer in self._layers[:done]:
                replaced.enter_context(_answers(layer, self._kept[done - 1, ""]))
            if self.parts and done == border.layers:
                for name in border.parts:
                    part = self._layers[done].get_submodule(name)
                    replaced.enter_context(_answers(part, self._kept[done, name]))
            return self._body.run(unit)

    def forget(self) -> None:
        """Free what is kept."""
        self._kept.clear()

    def _keeper(self, key: tuple[int, str]) -> Callable[[Any], None]:
        def keep(output: Any) -> None:
            self._kept[key] = output

        return keep

    def _check(self) -> str | None:
        """Return why passes from a border differ from whole ones; None where they give the same bits."""
        vocab_size = int(self._body.model.config.get_text_config(decoder=True).vocab_size)
        ids = np.random.default_rng(3).integers(0, vocab_size, size=16).astype(np.int32)
        unit = PaddedBatch([ids], [np.arange(len(ids))])
        try:
            whole = self.compute(unit)
            for number in range(len(self._layers) + 1):
                parts = tuple(self._children[number]) if number < len(self._layers) else ()
                if not torch.equal(self.run_from(Border(number, parts), unit), whole):
                    return f"from layer {number} on it computes something else than as a whole"
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as error:
            return f"its layers cannot be run one by one ({type(error).__name__}: {error})"
        finally:
            self.forget()
        return None


class _Order:
    """In which order the modules of a body begin and end, from one short pass."""

    def __init__(self, body: Body) -> None:
        self._begin: dict[str, int] = {}
        self._end: dict[str, int] = {}
        clock = iter(range(1 << 30))
        with ExitStack() as hooks:
            for name, module in body.model.named_modules():
                if name:
                    hooks.enter_context(_timed(name, module, self._begin, self._end, clock))
            body.run(PaddedBatch([np.arange(4, dtype=np.int32)], [np.arange(4)]))

    def border(self, modules: Sequence[str], layers: str, children: Sequence[Sequence[str]]) -> Border:
        begin = min(self._begin_of(name) for name in modules) if modules else 0.0
        ends = [self._end.get(f"{layers}.{i}", float("inf")) for i in range(len(children))]
        done = sum(end < begin for end in ends)
        if done == len(children):
            return Border(done)
        parts = (p for p in children[done] if self._end.get(f"{layers}.{done}.{p}", float("inf")) < begin)
        return Border(done, tuple(parts))

    def _begin_of(self, name: str) -> float:
        """Return when a module begins. One that was not called begins with what it is part of; a head never."""
        inside = [time for other, time in self._begin.items() if other == name or other.startswith(f"{name}.")]
        if inside:
            return min(inside)
        parent = name.rpartition(".")[0]
        return self._begin_of(parent) if parent else float("inf")


def _parts_with_matrices(layer: torch.nn.Module) -> list[str]:
    """Return the direct parts of a layer that hold matrices, but for the last one."""
    held = [name for name, m in layer.named_children() if any(p.ndim > 1 for p in m.parameters())]
    return held[:-1]


@contextmanager
def _hooked(module: torch.nn.Module, keep: Callable[[Any], None]) -> Iterator[None]:
    handle = module.register_forward_hook(lambda _module, _inputs, output: keep(output))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _timed(
    name: str, module: torch.nn.Module, begin: dict[str, int], end: dict[str, int], clock: Iterator[int]
) -> Iterator[None]:
    def begins(*_: Any) -> None:
        begin.setdefault(name, next(clock))

    def ends(*_: Any) -> None:
        end[name] = next(clock)

    handles = module.register_forward_pre_hook(begins), module.register_forward_hook(ends)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _answers(module: torch.nn.Module, output: Any) -> Iterator[None]:
    """Within this block the module returns the given output."""
    before = vars(module).get("forward")  # accelerate's hooks are such functions
    module.forward = lambda *_args, **_kwargs: output
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
