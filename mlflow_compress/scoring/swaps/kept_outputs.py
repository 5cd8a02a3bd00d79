"""A baseline's outputs of one batch, kept at the borders of its layers: what lies before a swap is not computed again.

A kept output is returned by the layer itself, whose `forward` is replaced for the time of one pass. So the model's own
code runs: masks, positions and whatever else its body does between the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from math import ceil
from typing import Any

import numpy as np
import torch

from mlflow_compress.errors import ConfigError
from mlflow_compress.models.weight_groups import decoder_layers
from mlflow_compress.scoring.forward.body import Body
from mlflow_compress.scoring.plan.units import PaddedBatch
from mlflow_compress.scoring.swaps.call_order import Border, call_order

Tensor = torch.Tensor
_CANNOT = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError)


class KeptOutputs:
    """Keeps the outputs of a baseline's layers for one batch, and runs the batch again from any border between them.

    Parameters
    ----------
    body : Body
        The baseline's.
    longest : int
        Tokens of the largest batch, with padding.
    max_bytes : int
        Most memory that the kept outputs may take. Where there is room, the outputs of every layer and of its parts are
        kept, and the inputs of the last module of each part; else the output of every layer; else of every k-th layer,
        from which the layers up to a swap are computed again.

    Attributes
    ----------
    every : int
        k.
    inside : bool
        Whether anything inside of layers is kept.
    whole_model_reason : str or None
        Why every pass computes all layers; None where it need not.

    Raises
    ------
    ConfigError
        Not even one layer's output fits.
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
