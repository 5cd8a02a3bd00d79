"""Measures swaps: how far the final distributions of a baseline move when some of its modules are replaced."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from mlflow_compress.errors import AlignmentError, ConfigError, DataError
from mlflow_compress.models.loading import LoadedModel, check_same_tokenizer
from mlflow_compress.models.weight_groups import Differences, WeightGroup, restored_weight
from mlflow_compress.records import SwapDistances
from mlflow_compress.scoring.engine import default_limits
from mlflow_compress.scoring.forward.body import Body, split_body_and_head
from mlflow_compress.scoring.forward.head import Head, LanguageModelHead
from mlflow_compress.scoring.journal import Arrays, PassParts
from mlflow_compress.scoring.kernels.logit_stats import KlBaseline, compute_kl
from mlflow_compress.scoring.plan.corpus_windows import Windows
from mlflow_compress.scoring.plan.units import PaddedBatch
from mlflow_compress.scoring.scoring_pass import ModelRunner
from mlflow_compress.scoring.swaps.layer_outputs import Border, KeptOutputs

NO_SWAP, ALL = "none", "all"


@dataclass(frozen=True)
class Swap:
    """Modules that replace those of the same names in a baseline."""

    name: str  # Unique among the swaps that are measured together
    # By their names in `model.named_modules()`. Each is called in place of the baseline's, with its own activation
    # quantization. Empty: nothing is replaced.
    modules: Mapping[str, torch.nn.Module] = field(repr=False)

    @classmethod
    def of(cls, group: WeightGroup, variant: Any, name: str | None = None) -> Swap:
        """Return the swap of one group of weights; `name` is the group's where it is not given."""
        return cls(name or group.name, {module: variant.get_submodule(module) for module in group.modules})

    @classmethod
    def together(cls, name: str, swaps: list[Swap]) -> Swap:
        """Return all swaps at once."""
        return cls(name, {path: module for swap in swaps for path, module in swap.modules.items()})


@contextmanager
def swapped(model: Any, swap: Swap) -> Iterator[None]:
    """Within this block the model has the modules of the swap."""
    before: list[tuple[torch.nn.Module, str, torch.nn.Module]] = []
    try:
        for path, module in swap.modules.items():
            parent_path, _, leaf = path.rpartition(".")
            parent = model.get_submodule(parent_path)
            before.append((parent, leaf, parent.get_submodule(leaf)))
            parent._modules[leaf] = module
        yield
    finally:
        for parent, leaf, module in before:
            parent._modules[leaf] = module


Tensor = torch.Tensor


def noise_swap(
    group: WeightGroup, name: str, baseline: Any, variant: Any, found: Differences, *, seed: int
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
            new = restored_weight(variant, path, found) if part == "weight" else _parameter(variant, path, part)
            if new is None or new.shape != old.shape:
                return f"{path}.{part} is not stored as floating-point numbers of the baseline's shape"
            owner, _, leaf = part.rpartition(".")
            if id(old) not in weights:
                size = (new.to(old.device) - old.float()).norm()
                noise = _with_noise(old, size, f"{seed} {path} {part}")
                weights[id(old)] = torch.nn.Parameter(noise, requires_grad=False)
            noisy.get_submodule(owner)._parameters[leaf] = weights[id(old)]
        modules[path] = noisy.eval()
    return Swap(name, modules) if modules else "the group has no matrix"


def _parameter(variant: Any, path: str, part: str) -> Tensor | None:
    parameter = dict(variant.get_submodule(path).named_parameters()).get(part)
    return parameter.data.float() if parameter is not None and parameter.is_floating_point() else None


def _with_noise(weight: Tensor, size: Tensor, key: str) -> Tensor:
    """Return a weight plus noise of a Frobenius norm; the key decides the noise, on every device."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1)
    noise = torch.randn(weight.shape, generator=generator).to(weight.device)
    noisy: Tensor = weight.data.float() + noise * (size / noise.norm())
    return noisy.to(weight.dtype)


STATE_BYTES = 1 << 30
WHOLE = "whole variant"


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
        self._runner = _runner(baseline)
        body = self._runner.body
        assert isinstance(body, Body)  # of a model in this process
        self._body = body
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
        """Return the distance of every swap from the baseline, at every scored token.

        A swap of nothing, `NO_SWAP`, is measured beside them: from another layer in every batch, and its distance must
        be exactly 0.

        `task` names the corpus in the records; `windows` come from `corpus_windows.cut`. A `variant` is measured as a
        whole model too, as `WHOLE`. A pass that was interrupted resumes from the folder `resume`, and loses the batch
        that it was at; delete the folder when the records are saved. `identity` is what the replaced modules are
        (hashes of checkpoints, seeds).

        Raises `ConfigError`: two swaps have one name, or the memory for kept outputs is too small. Raises `DataError`:
        there is no text. Raises `AlignmentError`: the swap of nothing has moved the model: nothing that was measured
        here could be trusted. Or the variant has another tokenizer. Raises `StoreError`: the folder to resume from
        belongs to another pass, or is damaged.
        """
        names = [NO_SWAP, *(swap.name for swap in swaps), *([WHOLE] if variant is not None else [])]
        if len(set(names)) < len(names):
            raise ConfigError("Two swaps have one name", got=next(n for n in names if names.count(n) > 1))
        if not windows.ids:
            raise DataError("There is no text to measure on", got=task)
        whole = None
        if variant is not None:
            check_same_tokenizer(self.baseline, variant)
            whole = _runner(variant)
        plan, targets = windows.plan(self._batch_tokens)
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
            "targets": hashlib.sha256(targets.row.tobytes() + targets.token.tobytes()).hexdigest(),
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
                found = self._batch(units[number], kept, [no_swap, *starts], [Swap(NO_SWAP, {}), *swaps], whole)
                parts.add(number, number + 1, found, None)
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
        logits = [KlBaseline(chunk.clone()) for chunk in self._logits(self._runner.head, states)]
        columns = []
        for swap, start in zip(swaps, starts, strict=True):
            with swapped(self._body.model, swap):
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
        head = self._runner.head
        return Head(self._body.model) if isinstance(head, Head) and head.name in swap.modules else head

    def _logits(self, head: LanguageModelHead, states: Tensor) -> Iterator[Tensor]:
        # Cloned, because a product's rounding may depend on where its input is in memory.
        for begin in range(0, len(states), self._head_rows):
            yield head.logits(states[begin : begin + self._head_rows].clone())


def _runner(loaded: LoadedModel) -> ModelRunner:
    body, head, _ = split_body_and_head(loaded.model)
    return ModelRunner(body, head)


def _compared(moved: Iterator[Tensor], baseline: Sequence[KlBaseline]) -> Arrays:
    found = [compute_kl(logits, base) for logits, base in zip(moved, baseline, strict=True)]
    kl, top = (torch.cat(values).numpy() for values in zip(*found, strict=True))
    return {"kl": kl, "top": top.astype(np.int32)}


def _records(task: str, windows: Windows, names: Sequence[str], found: Arrays) -> SwapDistances:
    counts = [len(positions) for positions in windows.scored]
    n_rows, n = sum(counts), len(names)
    texts = windows.names or [str(number) for number in range(len(counts))]
    columns = {
        "task": np.full(n_rows * n, task, dtype=object),
        "swap": np.repeat(np.asarray(names, dtype=object), n_rows),
        "item_id": np.tile(np.repeat(np.asarray(texts, dtype=object), counts), n),
        "position": np.tile(np.concatenate(windows.scored), n),
        "kl": found["kl"].T.reshape(-1),
        "top": found["top"].T.reshape(-1),
        "same_top": (found["top"] == found["top"][:, :1]).T.reshape(-1),
    }
    return SwapDistances.from_columns(columns)
