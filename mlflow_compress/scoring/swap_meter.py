"""Measures swaps: how far the final distributions of a baseline move when some of its modules are replaced.

The outputs of a batch's layers are kept, so that the layers before a swap are not computed again. A kept output is
returned by the layer itself, whose `forward` is replaced for the time of one pass. So the model's own code runs: masks,
positions and whatever else its body does between the layers.
"""

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
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
_STATE_BYTES = 1 << 30
_CANNOT = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError)


class KeptOutputs:
    """Keeps the outputs of a baseline's layers for one batch, and runs the batch again behind any number of them.

    `longest` is the tokens of the largest batch, with padding. Where `max_bytes` have room, the output of every layer
    is kept; else of every k-th layer (`every`), from which the layers up to a swap are computed again.
    `whole_model_reason` says why every pass computes all layers; None where it need not.
    """

    def __init__(self, body: Body, longest: int, max_bytes: int) -> None:
        self._body = body
        self._kept: dict[int, Any] = {}
        self._name, self._layers = "", torch.nn.ModuleList()
        self.every = 1
        self.whole_model_reason: str | None = None
        layers = decoder_layers(body.model)
        if layers is None:
            self.whole_model_reason = "its decoder layers were not found"
            return
        self._name, self._layers = layers
        try:
            self.whole_model_reason = self._check()
        except _CANNOT as error:
            self.whole_model_reason = f"its layers cannot be run one by one ({type(error).__name__}: {error})"
        if self.whole_model_reason is None:
            width = int(body.model.config.get_text_config(decoder=True).hidden_size)
            self._fit(longest * width * body.model.dtype.itemsize, max_bytes)

    def _fit(self, one: int, max_bytes: int) -> None:
        if one > max_bytes:
            raise ConfigError(
                "The memory for cached states cannot hold the output of one layer",
                allowed=f"{one / 2**30:.3g} GiB or more",
                got=f"{max_bytes / 2**30:.3g} GiB",
            )
        self.every = ceil(len(self._layers) / (max_bytes // one))

    @property
    def n_layers(self) -> int:
        return len(self._layers)

    def finished(self, modules: Iterable[str]) -> int:
        """Return the number of layers that are finished before the first of these modules begins."""
        return min(map(self._finished, modules), default=self.n_layers)

    def _finished(self, module: str) -> int:
        if self.whole_model_reason is not None:
            return 0
        if module.startswith(f"{self._name}."):
            return int(module.removeprefix(f"{self._name}.").partition(".")[0])
        # The head follows all layers. Of other modules nothing is known.
        model = self._body.model
        return self.n_layers if model.get_submodule(module) is model.get_output_embeddings() else 0

    def compute(self, unit: PaddedBatch) -> Tensor:
        """Run the whole batch, keep what is passed, and return the head's inputs."""
        # What is kept of the last batch is replaced piece by piece: memory that is freed at once is slow to come back.
        if self.whole_model_reason is not None:
            return self._body.run(unit)
        with ExitStack() as hooks:
            for number, layer in enumerate(self._layers):
                if (number + 1) % self.every == 0 or number + 1 == len(self._layers):
                    hooks.callback(layer.register_forward_hook(partial(self._keep, number)).remove)
            return self._body.run(unit)

    def run_behind(self, finished: int, unit: PaddedBatch) -> Tensor:
        """Run the batch of the last `compute` again behind so many layers, and return the head's inputs."""
        done = finished if finished == len(self._layers) else finished // self.every * self.every
        with ExitStack() as answering:
            for layer in self._layers[:done]:
                answering.enter_context(replaced(layer, "forward", lambda *_args, **_kwargs: self._kept[done - 1]))
            return self._body.run(unit)

    def forget(self) -> None:
        self._kept.clear()

    def _keep(self, number: int, _module: Any, _inputs: Any, output: Any) -> None:
        # Of a tuple only the states: attention weights would grow with the square of the length.
        self._kept[number] = (output[0], *(None for _ in output[1:])) if isinstance(output, tuple) else output

    def _check(self) -> str | None:
        """Return why passes behind some layers differ from whole ones; None where they give the same bits."""
        vocab_size = int(self._body.model.config.get_text_config(decoder=True).vocab_size)
        ids = np.random.default_rng(3).integers(0, vocab_size, size=16).astype(np.int32)
        unit = PaddedBatch([ids], [np.arange(len(ids))])
        whole = self.compute(unit)
        for finished in range(len(self._layers) + 1):
            if not torch.equal(self.run_behind(finished, unit), whole):
                return f"from layer {finished} on it computes something else than as a whole"
        self.forget()
        return None


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
    layers are kept. Each swap then computes only the layers from its first module on.

    Besides the two models' weights, the memory holds the kept outputs, at most `state_bytes`, and the baseline's logits
    of one batch: scored tokens x vocabulary x 4 bytes.

    `suffix_only=False` computes every layer for every swap, with the same bits; it is there to be compared with.
    `whole_model_reason` says why the last `measure` computed all layers; None where it did not have to.
    """

    def __init__(
        self,
        baseline: LoadedModel,
        *,
        state_bytes: int = _STATE_BYTES,
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
        keeps = self._suffix_only and kept.whole_model_reason is None
        starts = [kept.finished(swap.modules) if self._suffix_only else 0 for swap in swaps]

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
                no_swap = number % (kept.n_layers + 1) if keeps else 0
                batch = self._batch(units[number], kept, [no_swap, *starts], [Swap(NO_SWAP, {}), *swaps], whole)
                parts.add(number, number + 1, batch, None)
                bar.update()
        kept.forget()
        return _records(task, windows, names, parts.joined())

    def _batch(
        self,
        unit: PaddedBatch,
        kept: KeptOutputs,
        starts: Sequence[int],
        swaps: Sequence[Swap],
        whole: ModelRunner | None,
    ) -> Arrays:
        """Return KL and most probable token of every scored token of a batch, each shape (n_rows, n_swaps)."""
        states = kept.compute(unit)
        logits = [KlBaseline(chunk.clone()) for chunk in self._logits(self._baseline_head, states)]
        columns = []
        for swap, start in zip(swaps, starts, strict=True):
            with replaced_modules(self._body.model, swap.modules):
                moved = kept.run_behind(start, unit)
                columns.append(_compared(self._logits(self._head(swap), moved), logits))
            if swap.name == NO_SWAP and columns[-1]["kl"].any():
                raise AlignmentError(
                    "Without any swap this model does not reproduce its own numbers",
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
