"""Models whose weights wait on a disk: all batches of a sweep go through a layer before the next layer is fetched.

The model's own `forward` is called for each batch and layer, with its decoder layers replaced: those before the present
one hand hidden states on, the present one gets the states that the batch has reached. So masks, position embeddings and
whatever else a layer is given are made by the model's own code, and are not kept. Between two layers only the hidden
states of the sweep are.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlflow_compress.errors import UnsupportedError, is_no_memory
from mlflow_compress.files import writing
from mlflow_compress.models import offloading
from mlflow_compress.models.weight_groups import decoder_layers
from mlflow_compress.scoring.forward.body import Body, WholeModelBody, probe_units
from mlflow_compress.scoring.forward.head import replaced_modules
from mlflow_compress.scoring.forward.tree_attention import TreeAttention, install_tree_attention
from mlflow_compress.scoring.plan.packing import (
    NO_PREFIX,
    PackedBatch,
    PaddedBatch,
    Plan,
    UnitGroup,
    cut_to_fit,
    n_scored_rows,
    n_states,
)

Tensor = torch.Tensor
Unit = PackedBatch | PaddedBatch
Form = Callable[[int], torch.nn.Module]
"""Makes another form of the layer with a number, whose weights are in memory."""

_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError)  # of a model's code

_JOURNAL = (
    "layers.npy"  # JSON of the units, the layer's number and the dtypes, then the states, one array after another
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StateSizes:
    """Bytes of the hidden states between two layers, and of the weights that are read for them."""

    width: int  # The states of one token
    row: int  # What `run` returns at a scored position
    waiting: int  # The weights that are read once a sweep

    def taken_by(self, plan: Plan, group: UnitGroup) -> int:
        """Return the most that a sweep holds of a group: the states behind each layer, then what `run` returns."""
        return sum(max(n_states(unit) * self.width, n_scored_rows(unit) * self.row) for unit in plan.units[group.units])


def say_reads(n_sweeps: int, waiting: int, most: int, where: str = "") -> None:
    """Say how often the waiting weights are read, and what the hidden states of a sweep take at most."""
    text = "Layer by layer%s: %d x %.3g GB of weights are read, up to %.3g GB of hidden states are in memory"
    logger.warning(text, where, n_sweeps, waiting / 1e9, most / 1e9)


class _Reached(Exception):  # noqa: N818 - it ends a forward pass, and is no error
    """Carries what the present layer returns out of the model's forward."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class _Stand(torch.nn.Module):
    """Stands where a decoder layer is, and looks like it."""

    def __init__(self, body: "BodyByLayer", number: int, layer: torch.nn.Module) -> None:
        super().__init__()
        self.__dict__.update(_body=body, _number=number, _layer=layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        body = self._body
        if self._number < body.present:
            states = args[0] if args else kwargs["hidden_states"]
            return (states, *[None] * body.n_others) if body.n_others is not None else states
        if body.states is not None:
            args, kwargs = (
                ((body.states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": body.states})
            )
        output = (body.form or self._layer)(*args, **kwargs)
        if self._number == body.n_layers - 1:
            return output
        raise _Reached(output)


class BodyByLayer(Body):
    """A body that runs many units layer by layer (`prepare`) before they are asked for one by one (`run`).

    `room` is how many bytes the hidden states of one sweep may take; at least a group of units is run at once. Into the
    folder `journal`, which belongs to one pass, a sweep writes its states after a layer, at most once in `seconds`; a
    killed one goes on behind that layer. None: nothing is written.

    With `forms`, the units run through each form of a layer while the layer is in memory, and not through the layer
    itself: each form has a stream of states of its own (`run_forms`).
    """

    def __init__(self, body: Body, room: int) -> None:
        super().__init__(body.model)
        self._whole, self._last_layer = body, body._last_layer
        self.room = room
        self.journal: Path | None = None
        self.seconds = 0.0
        self.forms: Sequence[Form] = ()
        self.form: torch.nn.Module | None = None  # What computes in place of the present layer
        self.present = 0  # The number of the layer that computes
        self.states: Tensor | None = None  # What it is given instead of the embeddings
        self.n_others: int | None = None  # Values that a layer returns behind its hidden states; None: no tuple
        self._reached: Tensor | None = None
        self._ready: dict[int, list[Tensor]] = {}
        name, layers = decoder_layers(self.model) or ("", torch.nn.ModuleList())
        self._layers = list(layers)
        config = self.model.config.get_text_config(decoder=True)
        width = int(config.hidden_size) * int(self.model.dtype.itemsize)
        self.sizes = StateSizes(
            width=width,
            row=4 * int(config.vocab_size) if isinstance(body, WholeModelBody) else width,  # which returns ln p
            waiting=sum(p.nbytes for layer in layers for p in layer.parameters() if p.device.type == "meta"),
        )
        self._stands = {f"{name}.{n}": _Stand(self, n, layer) for n, layer in enumerate(layers)}

    @property
    def is_ahead(self) -> bool:
        """Whether units are prepared that were not run yet."""
        return bool(self._ready)

    def run(self, unit: Unit, attention: TreeAttention | None = None) -> Tensor:
        ready = self._ready.pop(id(unit), None)
        return super().run(unit, attention) if ready is None else ready[0]

    def run_forms(self, unit: Unit) -> list[Tensor]:
        """Return a prepared unit's states of each form of the layers."""
        return self._ready.pop(id(unit))

    def has(self, prefix: int) -> bool:
        return self.is_ahead or super().has(prefix)

    def clear(self) -> None:
        super().clear()
        self._ready.clear()

    def prepare(
        self, plan: Plan, numbers: Iterable[int], attention: TreeAttention, last_use: dict[int, list[int]]
    ) -> None:
        """Compute the plan's units with these numbers, of which `run` then returns the states.

        Where memory runs out, nothing is prepared, and `run` computes as if this had not been called; with `forms` it
        is an `UnsupportedError`.
        """
        self.clear()
        work = list(_with_makers(plan, numbers))
        try:
            with torch.inference_mode():
                states = self._sweep(work, attention, last_use)
        except RuntimeError as error:
            if not is_no_memory(error):
                raise
            self.clear()
            if self.forms:
                raise UnsupportedError(
                    f"Memory ran out on {len(work)} batches of {len(self.forms)} models: {error}",
                    fix="Score fewer variants at once",
                ) from error
            logger.warning("Memory ran out on %d batches at once; going on batch by batch", len(work))
            return
        for index, (unit, number) in enumerate(work):
            if number is not None:
                self._ready[id(unit)] = states[index :: len(work)]

    def say_reads(self, plan: Plan, groups: Sequence[UnitGroup]) -> None:
        """Say how often the waiting weights are read for a plan, and what its hidden states take at most."""
        taken = [
            sum(sweep_bytes(self, plan, groups[n]) for n in sweep)
            for sweep in sweeps([self], plan, groups, range(len(groups)))
        ]
        say_reads(len(taken), self.sizes.waiting, max(taken, default=0))

    def _sweep(
        self, work: list[tuple[Unit, int | None]], attention: TreeAttention, last_use: dict[int, list[int]]
    ) -> list[Tensor]:
        """Return what `Body.run` does for each unit; with `forms`, of the first form, then of the next ones."""
        units = [number for _, number in work] * max(1, len(self.forms))
        first, states = self._written(units)
        written = time.monotonic()
        try:
            # What lies outside the layers, such as the last norm, is held too.
            with replaced_modules(self.model, self._stands), offloading.held(self.model):
                for present, layer in list(enumerate(self._layers))[first:]:
                    self.present = present
                    following = self._layers[present + 1] if present + 1 < self.n_layers else None
                    with offloading.held(layer), offloading.read_ahead(following):
                        for stream, form in enumerate(self.forms or (None,)):
                            self._run_stream(work, states, stream * len(work), form, attention, last_use)
                    if self.journal is not None and time.monotonic() - written >= self.seconds:
                        self._write(self.journal, units, states)
                        written = time.monotonic()
        finally:
            self.present, self.states, self._reached = 0, None, None
        return states

    def _run_stream(
        self,
        work: list[tuple[Unit, int | None]],
        states: list[Any],
        first: int,
        form: Form | None,
        attention: TreeAttention,
        last_use: dict[int, list[int]],
    ) -> None:
        """Run all units through the present layer, or a form of it; their states are those from number `first` on."""
        last_layer = self._last_layer
        try:
            if form is not None:
                self.form = form(self.present)
                if last_layer is not None:  # it computes at the scored positions only
                    self._last_layer = self.form if self.present == self.n_layers - 1 else None
            for index, (unit, number) in enumerate(work, start=first):
                self.states, states[index] = states[index], None
                if self.states is not None and self.form is not None:  # which has no hook that does it
                    self.states = self.states.to(next(self.form.parameters()).device)
                out = super().run(unit, attention)
                if isinstance(unit, PackedBatch) and unit.keep != NO_PREFIX:
                    # Only this layer's are needed; those of the others are read for their length.
                    self._prefixes[unit.keep] = [self._prefixes[unit.keep][self.present]] * self.n_layers
                for prefix in last_use.get(number, ()) if number is not None else ():
                    self.forget(prefix)
                reached, self._reached = self._reached, None  # None behind the last layer
                states[index] = (out if reached is None else reached).cpu()
        finally:
            self.form, self._last_layer = None, last_layer
            self._prefixes.clear()

    def _write(self, journal: Path, units: list[int | None], states: list[Any]) -> None:
        """Write the states behind the present layer: not as safetensors, which would first copy all of them."""
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in states]
        head = json.dumps({"units": units, "layers": self.present + 1, "dtypes": dtypes})
        with writing(journal / _JOURNAL) as file:
            np.save(file, np.frombuffer(head.encode(), dtype=np.uint8), allow_pickle=False)
            for tensor in states:  # as bytes, because NumPy has no bfloat16
                np.save(file, tensor.contiguous().view(torch.uint8).numpy(), allow_pickle=False)

    def _written(self, units: list[int | None]) -> tuple[int, list[Any]]:
        """Return how many layers a killed sweep over these units had written the states of, and these states."""
        if self.journal is not None and (path := self.journal / _JOURNAL).is_file():
            with path.open("rb") as file:
                head = json.loads(np.load(file, allow_pickle=False).tobytes())
                if head["units"] == units:
                    logger.warning("A sweep goes on behind layer %d of %d", head["layers"], self.n_layers)
                    arrays = [torch.from_numpy(np.load(file, allow_pickle=False)) for _ in units]
                    dtypes = [getattr(torch, name) for name in head["dtypes"]]
                    return head["layers"], [a.view(dtype) for a, dtype in zip(arrays, dtypes, strict=True)]
        return 0, [None] * len(units)

    def _forward(self, **inputs: Any) -> Tensor:
        try:
            return self._whole._forward(**inputs)
        except _Reached as reached:
            output = reached.output
        is_tuple = isinstance(output, tuple)
        self.n_others = len(output) - 1 if is_tuple else None
        states: Tensor = output[0] if is_tuple else output
        self._reached = states
        return states


def _with_makers(plan: Plan, numbers: Iterable[int]) -> Iterator[tuple[Unit, int | None]]:
    """Return the units with these numbers, and before them, without a number, the packs whose prefixes they need."""
    made: set[int] = {NO_PREFIX}

    def makers(unit: Unit) -> Iterator[tuple[Unit, None]]:
        if isinstance(unit, PackedBatch):
            if unit.prefix not in made:
                maker = plan.makers[unit.prefix]
                yield from makers(maker)
                yield maker, None
            made.add(unit.keep)

    for number in numbers:
        yield from makers(plan.units[number])
        yield plan.units[number], number


def sweeps(
    bodies: Sequence[Any], plan: Plan, groups: Sequence[UnitGroup], numbers: Iterable[int]
) -> Iterator[list[int]]:
    """Return the numbers of the groups, cut into what is run at once: one group where no body runs by layer."""
    by_layer, chosen = [body for body in bodies if isinstance(body, BodyByLayer)], list(numbers)
    sizes = [max((sweep_bytes(body, plan, groups[n]) for body in by_layer), default=1) for n in chosen]
    return (chosen[part] for part in cut_to_fit(sizes, min((body.room for body in by_layer), default=0)))


def sweep_bytes(body: BodyByLayer, plan: Plan, group: UnitGroup) -> int:
    """Return the most bytes that a sweep holds of a group, of all forms of the layers."""
    return max(1, len(body.forms)) * body.sizes.taken_by(plan, group)


def body_by_layer(body: Body, room: int) -> tuple[Body, str | None]:
    """Return a body that runs layer by layer, and None; or the body as it is, and why it cannot.

    A probe compares the two on padded sequences and on packs behind a prefix, bit for bit.
    """
    if decoder_layers(body.model) is None:
        return body, "its decoder layers are not found"
    other = BodyByLayer(body, room)
    reason = offloading.probed(body.model, lambda: _objection(body, other), lambda found: found is not None)
    return (other, None) if reason is None else (body, reason)


def _objection(body: Body, other: BodyByLayer) -> str | None:
    """Return why a body has other states layer by layer; None where they are the same."""
    ids, first, both = probe_units(int(body.model.config.get_text_config(decoder=True).vocab_size))
    units: list[Unit] = [PaddedBatch([ids, ids[:13]], [np.arange(3, 20), np.arange(13)])]
    with install_tree_attention() as attention:
        wanted = [body.run(units[0], attention)]
        try:
            wanted += [body.run(pack, attention) for pack in (first, both)]
            units += [first, both]
        except _ERRORS:
            wanted = wanted[:1]  # a model that takes no packs
        finally:
            body.clear()
        try:
            other.prepare(Plan(units, np.zeros((0, 16), np.uint8), []), range(len(units)), attention, {})
            same = all(other.run(unit).equal(states.cpu()) for unit, states in zip(units, wanted, strict=True))
        except _ERRORS as error:
            return f"{type(error).__name__}: {error}"
        finally:
            other.clear()
    return None if same else "its states differ from those of a whole forward pass"
