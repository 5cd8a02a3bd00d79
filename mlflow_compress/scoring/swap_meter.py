"""Measures swaps: how far the final distributions of a baseline move when some of its modules are replaced.

A batch's outputs are kept at the borders of the layers, so that what lies before a swap is not computed again. A kept
output is returned by the layer itself, whose `forward` is replaced for the time of one pass. So the model's own code
runs: masks, positions and whatever else its body does between the layers.
"""

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from mlflow_compress.errors import AlignmentError, ConfigError, DataError
from mlflow_compress.models.identity import check_same_tokenizer
from mlflow_compress.models.length_regimes import length_regimes
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.models.weight_groups import Differences, WeightGroup, decoder_layers, restored_weight
from mlflow_compress.records import SwapDistances
from mlflow_compress.replaced import replaced
from mlflow_compress.scoring.engine import default_limits
from mlflow_compress.scoring.forward.body import Body, split_body_and_head
from mlflow_compress.scoring.forward.head import Head, LanguageModelHead, replaced_modules
from mlflow_compress.scoring.journal import Arrays, PassParts
from mlflow_compress.scoring.kernels.logit_stats import KlBaseline, compute_kl
from mlflow_compress.scoring.plan.corpus_windows import Windows
from mlflow_compress.scoring.plan.packing import PaddedBatch
from mlflow_compress.scoring.scoring_pass import ModelRunner

Tensor = torch.Tensor
NO_SWAP, ALL, WHOLE = "none", "all", "whole variant"
STATE_BYTES = 1 << 30
_TOKENS = 4  # of the pass that shows the order of calls
_CANNOT = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError)


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


class CallOrder:
    """The order in which a body's modules are called, as one pass over a few tokens shows it.

    `layers` names the list of decoder layers.
    """

    def __init__(self, body: Body, layers: str, n_layers: int) -> None:
        self._layers = layers
        self._calls: dict[str, _Call] = {}
        self.parts: list[tuple[str, ...]] = []  # By layer, its direct parts that hold matrices: ("self_attn", "mlp")
        self.tails: dict[tuple[int, str], str] = {}  # By layer and part, the module whose output is the part's output
        self._note_calls(body)
        self.layer_width = _width(self._calls[f"{layers}.0"].output)  # Values per token of one layer's output
        self.width = 0.0  # Values per token that are kept at all borders together
        for number in range(n_layers):
            layer = f"{layers}.{number}"
            parts = tuple(
                name
                for name, module in body.model.get_submodule(layer).named_children()
                if any(p.ndim > 1 for p in module.parameters()) and f"{layer}.{name}" in self._calls
            )
            self.parts.append(parts)
            self.width += _width(self._calls[layer].output)
            for part in parts:
                self.width += _width(self._calls[f"{layer}.{part}"].output)
                if (leaf := self._tail(f"{layer}.{part}")) is not None:
                    self.tails[number, part] = leaf
                    self.width += _width(self._calls[f"{layer}.{part}.{leaf}"].inputs)

    def border(self, modules: Sequence[str]) -> Border:
        """Return the last border before all of these modules."""
        begin = min((self._begin(name) for name in modules), default=0.0)
        done = sum(self._end(f"{self._layers}.{number}") < begin for number in range(len(self.parts)))
        if done == len(self.parts):
            return Border(done)
        layer = f"{self._layers}.{done}"
        parts = tuple(part for part in self.parts[done] if self._end(f"{layer}.{part}") < begin)
        for part in self.parts[done]:
            leaf = self.tails.get((done, part))
            if leaf is not None and self._begin(f"{layer}.{part}.{leaf}") == begin:
                return Border(done, parts, (part, leaf))
        return Border(done, parts)

    def _note_calls(self, body: Body) -> None:
        clock = iter(range(1 << 30))

        def begins(name: str, _module: Any, inputs: Any) -> None:
            self._calls.setdefault(name, _Call(next(clock), inputs=inputs))

        def ends(name: str, _module: Any, _inputs: Any, output: Any) -> None:
            self._calls[name].end, self._calls[name].output = next(clock), output

        with ExitStack() as hooks:
            for name, module in body.model.named_modules():
                if name:
                    hooks.callback(module.register_forward_pre_hook(partial(begins, name)).remove)
                    hooks.callback(module.register_forward_hook(partial(ends, name)).remove)
            body.run(PaddedBatch([np.arange(_TOKENS, dtype=np.int32)], [np.arange(_TOKENS)]))

    def _end(self, name: str) -> float:
        return self._calls[name].end if name in self._calls else math.inf

    def _begin(self, name: str) -> float:
        """Return when a module begins. One that was not called begins with what it is part of; a head never."""
        inside = [c.begin for other, c in self._calls.items() if other == name or other.startswith(f"{name}.")]
        if inside:
            return min(inside)
        parent = name.rpartition(".")[0]
        return self._begin(parent) if parent else math.inf

    def _tail(self, part: str) -> str | None:
        """Return the innermost module in a part whose output is the part's output; None where something follows it."""
        output = _first_tensor(self._calls[part].output)
        for name in reversed(list(self._calls)):
            last = _first_tensor(self._calls[name].output)
            if name.startswith(f"{part}.") and last is not None and output is not None:
                same = last.data_ptr() == output.data_ptr() and last.shape == output.shape
                if same and len(self._calls[name].inputs) == 1:
                    return name.removeprefix(f"{part}.")
        return None


def _first_tensor(value: Any) -> Tensor | None:
    """Return a tensor, or the first member of a tuple of which it is one."""
    if isinstance(value, tuple | list) and value:
        value = value[0]
    return value if isinstance(value, Tensor) else None


def _width(value: Any) -> float:
    tensor = _first_tensor(value)
    return 0.0 if tensor is None else tensor.numel() / _TOKENS


class KeptOutputs:
    """Keeps the outputs of a baseline's layers for one batch, and runs the batch again from any border between them.

    `longest` is the tokens of the largest batch, with padding. Where `max_bytes` have room, the outputs of every layer
    and of its parts are kept (`inside`), and the inputs of the last module of each part; else the output of every
    layer; else of every k-th layer (`every`), from which the layers up to a swap are computed again.
    `whole_model_reason` says why every pass computes all layers; None where it need not.
    """

    def __init__(self, body: Body, longest: int, max_bytes: int) -> None:
        self._body = body
        self._kept: dict[tuple[int, str], Any] = {}
        self._layers = torch.nn.ModuleList()
        self.every, self.inside = 1, True
        self.whole_model_reason: str | None = None
        layers = decoder_layers(body.model)
        if layers is None:
            self.whole_model_reason = "its decoder layers were not found"
            return
        name, self._layers = layers
        try:
            self._order = CallOrder(body, name, len(self._layers))
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
        return len(self._layers)

    def border(self, modules: Sequence[str]) -> Border:
        return Border(0) if self.whole_model_reason is not None else self._order.border(modules)

    def compute(self, unit: PaddedBatch) -> Tensor:
        """Run the whole batch, keep what is passed, and return the head's inputs."""
        # What is kept of the last batch is replaced piece by piece: memory that is freed at once is slow to come back.
        if self.whole_model_reason is not None:
            return self._body.run(unit)
        with ExitStack() as hooks:
            for number, layer in enumerate(self._layers):
                if (number + 1) % self.every == 0 or number + 1 == len(self._layers):
                    hooks.callback(self._keep(layer, (number, "")))
                for part in self._order.parts[number] if self.inside else ():
                    hooks.callback(self._keep(layer.get_submodule(part), (number, part)))
                    if leaf := self._order.tails.get((number, part)):
                        path = f"{part}.{leaf}"
                        hooks.callback(self._keep(layer.get_submodule(path), (number, path), inputs=True))
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
        self._kept.clear()

    def _tail(self, module: torch.nn.Module, number: int, part: str, leaf: str) -> Any:
        """Return what a part returns when only its last module is computed, on its kept input."""
        before = self._kept[number, part]
        computed = module.get_submodule(leaf)(*self._kept[number, f"{part}.{leaf}"])
        return (computed, *before[1:]) if isinstance(before, tuple) else computed

    def _keep(self, module: torch.nn.Module, key: tuple[int, str], *, inputs: bool = False) -> Callable[[], None]:
        """Keep a module's output, or its inputs, at every call; return what ends that."""

        def keep(_module: Any, arguments: Any, output: Any) -> None:
            # Of a tuple only the states: attention weights would grow with the square of the length.
            states = (output[0], *(None for _ in output[1:])) if isinstance(output, tuple) else output
            self._kept[key] = arguments if inputs else states

        return module.register_forward_hook(keep).remove

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


def _answers(module: torch.nn.Module, answer: Callable[[], Any]) -> AbstractContextManager[object]:
    """Return a block within which the module returns an answer, whatever it is given."""
    return replaced(module, "forward", lambda *_args, **_kwargs: answer())


@dataclass(frozen=True)
class Swap:
    """Modules that replace those of the same names in a baseline."""

    name: str  # Unique among the swaps that are measured together
    # By their names in `model.named_modules()`. Each is called in place of the baseline's, with its own activation
    # quantization. Empty: nothing is replaced.
    modules: Mapping[str, torch.nn.Module] = field(repr=False)

    @classmethod
    def of(cls, group: WeightGroup, variant: Any, name: str | None = None) -> "Swap":
        """Return the swap of one group of weights; `name` is the group's where it is not given."""
        return cls(name or group.name, {module: variant.get_submodule(module) for module in group.modules})

    @classmethod
    def together(cls, name: str, swaps: "list[Swap]") -> "Swap":
        return cls(name, {path: module for swap in swaps for path, module in swap.modules.items()})


def noise_swap(
    group: WeightGroup, name: str, baseline: Any, variant: Any, differences: Differences, *, seed: int
) -> Swap | str:
    """Return a swap in which every matrix is the baseline's plus Gaussian noise, or why there is none.

    The noise of a matrix has the Frobenius norm of what the variant has changed in it, after scales that were moved
    between neighbours are moved back. Norms stay the baseline's. The same seed gives the same noise.
    """
    modules: dict[str, torch.nn.Module] = {}
    weights: dict[int, torch.nn.Parameter] = {}  # tied weights get one noise
    for path in group.modules:
        module = baseline.get_submodule(path)
        matrices = {part: p for part, p in module.named_parameters() if p.ndim > 1}
        if not matrices:
            continue
        noisy = copy.deepcopy(module)
        for part, old in matrices.items():
            new = restored_weight(variant, path, differences) if part == "weight" else _parameter(variant, path, part)
            if new is None or new.shape != old.shape:
                return f"{path}.{part} is not stored as floating-point numbers of the baseline's shape"
            owner, _, leaf = part.rpartition(".")
            if id(old) not in weights:
                size = (new.to(old.device) - old.float()).norm()
                key = hashlib.sha256(f"{seed} {path} {part}".encode()).digest()[:8]
                generator = torch.Generator().manual_seed(int.from_bytes(key, "big") >> 1)  # the same on every device
                noise = torch.randn(old.shape, generator=generator).to(old.device)
                moved = (old.data.float() + noise * (size / noise.norm())).to(old.dtype)
                weights[id(old)] = torch.nn.Parameter(moved, requires_grad=False)
            noisy.get_submodule(owner)._parameters[leaf] = weights[id(old)]
        modules[path] = noisy.eval()
    return Swap(name, modules) if modules else "the group has no matrix"


def _parameter(variant: Any, path: str, part: str) -> Tensor | None:
    parameter = dict(variant.get_submodule(path).named_parameters()).get(part)
    return parameter.data.float() if parameter is not None and parameter.is_floating_point() else None


class SwapMeter:
    """Measures swaps in one baseline, text by text.

    Texts go through the model in batches. For one batch the baseline's logits are computed once, and the outputs of its
    layers are kept. Each swap then computes only what comes after its first module.

    Besides the two models' weights, the memory holds the kept outputs, at most `state_bytes`, and the baseline's logits
    of one batch: scored tokens x vocabulary x 4 bytes.

    `suffix_only=False` computes every layer for every swap, with the same bits; it is there to be compared with.
    `whole_model_reason` says why the last `measure` computed all layers; None where it did not have to.
    """

    def __init__(
        self,
        baseline: LoadedModel,
        *,
        state_bytes: int = STATE_BYTES,
        suffix_only: bool = True,
        progress: bool = True,
    ) -> None:
        self.baseline = baseline
        self._body, self._baseline_head, _ = split_body_and_head(baseline.model)
        self.whole_model_reason: str | None = None
        self._state_bytes, self._suffix_only, self._progress = state_bytes, suffix_only, progress
        limits = default_limits(baseline.vocab_size, on_gpu=baseline.device.type == "cuda")
        self._batch_tokens, self._head_rows = limits["batch_tokens"], limits["head_rows"]

    def measure(
        self,
        task: str,
        windows: Windows,
        swaps: Sequence[Swap],
        *,
        variant: LoadedModel | None = None,
        resume: Path | None = None,
        identity: Mapping[str, str] | None = None,
    ) -> SwapDistances:
        """Return the distance of every swap from the baseline, at every scored token of the corpus `task`.

        A swap of nothing, `NO_SWAP`, is measured beside them: from another layer in every batch, and its distance must
        be exactly 0. A `variant` is measured as a whole model too, as `WHOLE`. A pass that was interrupted resumes from
        the folder `resume`, and loses the batch that it was at; delete the folder when the records are saved.
        `identity` is what the replaced modules are (hashes of checkpoints, seeds).

        Raises `ConfigError`: two swaps have one name, or the memory for kept outputs is too small. `DataError`: there
        is no text. `AlignmentError`: the variant has another tokenizer, or the swap of nothing has moved the model, so
        that nothing that was measured here could be trusted. `StoreError`: the folder to resume from belongs to another
        pass, or is damaged.
        """
        names = [NO_SWAP, *(swap.name for swap in swaps), *([WHOLE] if variant is not None else [])]
        if len(set(names)) < len(names):
            raise ConfigError("Two swaps have one name", got=next(n for n in names if names.count(n) > 1))
        if not windows.ids:
            raise DataError("There is no text to measure on", got=task)
        whole = None
        configs = [self.baseline.configuration()]
        if variant is not None:
            check_same_tokenizer(self.baseline, variant)
            configs.append(variant.configuration())
            whole = ModelRunner(*split_body_and_head(variant.model)[:2])
        plan, targets = windows.plan(self._batch_tokens, length_regimes(*configs))
        units = [unit for unit in plan.units if isinstance(unit, PaddedBatch)]
        longest = max(len(unit.sequences) * max(map(len, unit.sequences)) for unit in units)
        kept = KeptOutputs(self._body, longest, self._state_bytes)
        self.whole_model_reason = kept.whole_model_reason
        from_borders = self._suffix_only and kept.whole_model_reason is None
        starts = [kept.border(list(swap.modules)) if self._suffix_only else Border(0) for swap in swaps]

        about = {
            "weights": self.baseline.weights if resume is not None else "",
            "dtype": str(self.baseline.dtype),
            "plan": plan.digest,
            "targets": targets.digest,
            "swaps": json.dumps(names),
            "rounding": json.dumps(self.baseline.rounding),
            **(identity or {}),
        }
        parts = PassParts(len(units), (Path(resume) / task, about) if resume else None, None, label=task)
        missing = parts.missing()
        bar = tqdm(
            initial=len(units) - len(missing),
            total=len(units),
            desc=task,
            unit="batch",
            disable=None if self._progress else True,
        )
        with bar:
            for number in missing:
                no_swap = Border(number % (kept.n_layers + 1) if from_borders else 0)
                batch = self._batch(units[number], kept, [no_swap, *starts], [Swap(NO_SWAP, {}), *swaps], whole)
                parts.add(number, number + 1, batch, None)
                bar.update()
        kept.forget()
        return _records(task, windows, names, parts.joined())

    def _batch(
        self,
        unit: PaddedBatch,
        kept: KeptOutputs,
        starts: Sequence[Border],
        swaps: Sequence[Swap],
        whole: ModelRunner | None,
    ) -> Arrays:
        """Return KL and most probable token of every scored token of a batch, each shape (n_rows, n_swaps)."""
        states = kept.compute(unit)
        logits = [KlBaseline(chunk.clone()) for chunk in self._logits(self._baseline_head, states)]
        columns = []
        for swap, start in zip(swaps, starts, strict=True):
            with replaced_modules(self._body.model, swap.modules):
                moved = kept.run_from(start, unit)
                columns.append(_compared(self._logits(self._head(swap), moved), logits))
            if swap.name == NO_SWAP and columns[-1]["kl"].any():
                raise AlignmentError(
                    "Without any swap this model does not repeat its own numbers",
                    allowed="a KL of exactly 0",
                    got=float(columns[-1]["kl"].max()),
                    fix="Diagnose it on a CPU, or in float32",
                )
        if whole is not None:
            columns.append(_compared(self._logits(whole.head, whole.body.run(unit)), logits))
        return {name: np.stack([column[name] for column in columns], axis=1) for name in columns[0]}

    def _head(self, swap: Swap) -> LanguageModelHead:
        """Return the baseline's head, or the one that a swap brings along."""
        head = self._baseline_head
        return Head(self._body.model) if isinstance(head, Head) and head.name in swap.modules else head

    def _logits(self, head: LanguageModelHead, states: Tensor) -> Iterator[Tensor]:
        # Cloned, because a product's rounding may depend on where its input is in memory.
        for begin in range(0, len(states), self._head_rows):
            yield head.logits(states[begin : begin + self._head_rows].clone())


def _compared(moved: Iterator[Tensor], baseline: Sequence[KlBaseline]) -> Arrays:
    distances = [compute_kl(logits, base) for logits, base in zip(moved, baseline, strict=True)]
    kl, top = (torch.cat(values).numpy() for values in zip(*distances, strict=True))
    return {"kl": kl, "top": top.astype(np.int32)}


def _records(task: str, windows: Windows, names: Sequence[str], found: Arrays) -> SwapDistances:
    keys = {name: np.tile(values, len(names)) for name, values in windows.keys(task).items()}
    columns = {
        "swap": np.repeat(names, len(found["kl"])),
        "kl": found["kl"].T.reshape(-1),
        "top": found["top"].T.reshape(-1),
        "same_top": (found["top"] == found["top"][:, :1]).T.reshape(-1),
    }
    return SwapDistances.from_columns({**keys, **columns})
