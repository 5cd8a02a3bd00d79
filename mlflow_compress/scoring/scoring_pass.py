"""Carry out a plan: body by units, head by groups of rows, and what each row and each target yields."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tqdm.auto import tqdm

from mlflow_compress.errors import AlignmentError, UnsupportedError
from mlflow_compress.scoring.baseline_store.state_store import StateStore, StateWriter
from mlflow_compress.scoring.checkpointing.journal import Arrays, Journal
from mlflow_compress.scoring.forward.body import Body
from mlflow_compress.scoring.forward.head import Logits
from mlflow_compress.scoring.kernels.logit_stats import sweep
from mlflow_compress.scoring.kernels.row_divergence import KINDS
from mlflow_compress.scoring.plan.units import (
    NO_PREFIX,
    Group,
    PackedBatch,
    PaddedBatch,
    Plan,
    groups,
    last_uses,
    split,
)

logger = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]
DISTANCES = (*KINDS, "same_top", "top10", "rbo10")


@dataclass(frozen=True)
class Targets:
    """Tokens whose log-probability is wanted: `token[i]` after row `row[i]`; rows never fall, every row occurs."""

    row: Ints
    token: Ints

    @classmethod
    def of(cls, row: Ints, token: Ints) -> tuple[Targets, Ints]:
        """Return the distinct pairs in order of rows, and for each pair given its place among them."""
        pairs, place = np.unique(np.stack([row, token]), axis=1, return_inverse=True)
        return cls(pairs[0], pairs[1]), place.reshape(-1).astype(np.int64)

    def first_tokens(self) -> npt.NDArray[np.int32]:
        """Return the first target of every row."""
        _, first = np.unique(self.row, return_index=True)
        return self.token[first].astype(np.int32)


@dataclass(frozen=True)
class ModelRunner:
    """A model that runs: its body and its head."""

    body: Body
    head: Logits


@dataclass
class ScoringPass:
    """One pass over one plan. Its results are named arrays in the plan's row order.

    ``logprob`` (n_targets,): ln p of each target, in nats, float64. ``argmax`` (n_rows,): the most probable token, the
    lowest id of equals. With `entropy` also ``entropy`` (n_rows,) in nats; with a baseline what `DISTANCES` names, each
    (n_rows,), see `sweep.Sweep`.

    Attributes
    ----------
    lane : ModelRunner
        The model that is scored.
    head_rows : int
        Most rows a head product. Fixed by the settings, never by free memory: equal states then give equal bits.
    capture : StateWriter or None
        Receives the head's inputs.
    baseline : StateStore, ModelRunner or None
        A store, or a model that runs beside this one on the same batches.
    journal : Journal or None
        Where results go every `seconds`, and come from when a run was killed.
    entropy : bool
        Whether each row's entropy is wanted.
    """

    lane: ModelRunner
    head_rows: int
    capture: StateWriter | None = None
    baseline: StateStore | ModelRunner | None = None
    journal: Journal | None = None
    seconds: float = 60.0
    progress: bool = True
    label: str = "scoring"
    entropy: bool = False
    n_splits: int = field(default=0, init=False)
    _most_tokens: int | None = field(default=None, init=False)
    _spare: int = field(default=0, init=False)  # prefixes of split units are numbered downwards from -1

    def run(self, plan: Plan, targets: Targets) -> Arrays:
        """Run every unit that an earlier run has not done, and return all results."""
        found = self._find(plan)
        first = targets.first_tokens()
        cut = groups(plan, self.head_rows)
        parts, n_done = self._resume()
        finished = last_uses(plan.units)
        keepers = {u.keep: u for u in (*plan.before, *plan.units) if isinstance(u, PackedBatch) and u.keep != NO_PREFIX}
        fresh: list[Arrays] = []
        written = time.monotonic()
        bar = tqdm(
            total=plan.n_tokens, desc=self.label, unit="tok", unit_scale=True, disable=None if self.progress else True
        )
        with bar:
            bar.update(sum(g.n_tokens for g in cut[:n_done]))
            for number, group in enumerate(cut[n_done:], start=n_done):
                fresh.append(self._group(plan, group, keepers, finished, targets, found, first))
                bar.update(group.n_tokens)
                last = number == len(cut) - 1
                if self.journal is not None and (last or time.monotonic() - written >= self.seconds):
                    note = self.capture.progress() if self.capture is not None else {}
                    self.journal.append(number + 1, _joined(fresh), note)
                    parts += fresh
                    fresh, written = [], time.monotonic()
        for lane in self._lanes():
            lane.body.clear()
        if not cut:
            names = ["logprob", "argmax", *(["entropy"] if self.entropy else [])]
            return {name: np.zeros(0) for name in (*names, *(DISTANCES if self.baseline is not None else ()))}
        return _joined(parts + fresh)

    def _resume(self) -> tuple[list[Arrays], int]:
        if self.journal is None:
            return [], 0
        known = self.journal.load()
        if known and self.capture is not None:
            self.capture.restore(**known[-1][2])
        if known:
            logger.info("%s goes on after group %d of an interrupted run", self.label, known[-1][0])
        return [arrays for _, arrays, _ in known], known[-1][0] if known else 0

    def _lanes(self) -> list[ModelRunner]:
        return [self.lane, *([self.baseline] if isinstance(self.baseline, ModelRunner) else [])]

    def _find(self, plan: Plan) -> Ints | None:
        if not isinstance(self.baseline, StateStore):
            return None
        found = self.baseline.find(plan.keys)
        if (found < 0).any():
            raise AlignmentError(
                f"The baseline store lacks {int((found < 0).sum())} of the {len(found)} scored positions",
                fix="Evaluate baseline and variant on the same tasks, limit and seed, with the same tokenizer",
            )
        return found

    def _group(
        self,
        plan: Plan,
        group: Group,
        keepers: dict[int, PackedBatch],
        finished: dict[int, list[int]],
        targets: Targets,
        found: Ints | None,
        first: npt.NDArray[np.int32],
    ) -> Arrays:
        per_lane: list[list[torch.Tensor]] = [[] for _ in self._lanes()]
        for number in range(group.units.start, group.units.stop):
            unit = plan.units[number]
            for states, lane in zip(per_lane, self._lanes(), strict=True):
                states += self._states(lane.body, unit, keepers)
                for prefix in finished.get(number, ()):
                    lane.body.forget(prefix)
        ready = [torch.cat(states) for states in per_lane]
        parts = []
        for begin in range(0, len(ready[0]), self.head_rows):
            # Tensors of their own: a product's rounding may depend on how its input lies in memory.
            chunk = [states[begin : begin + self.head_rows].clone() for states in ready]
            rows = slice(group.rows.start + begin, group.rows.start + begin + len(chunk[0]))
            logits = self.lane.head.logits(chunk[0])
            if self.capture is not None:
                self.capture.append(chunk[0], logits, plan.keys[rows], first[rows])
            swept = sweep(logits, self._baseline(chunk, rows, found, logits.device))
            start, stop = np.searchsorted(targets.row, [rows.start, rows.stop])
            row, token = (
                torch.from_numpy(x) for x in (targets.row[start:stop] - rows.start, targets.token[start:stop])
            )
            chosen = logits[row.to(logits.device), token.to(logits.device)].double().cpu()
            results = {"logprob": chosen - swept.log_normaliser[row], "argmax": swept.argmax, **swept.distances}
            if self.entropy:
                results["entropy"] = swept.entropy
            parts.append({name: values.numpy() for name, values in results.items()})
        return _joined(parts)

    def _states(
        self, body: Body, unit: PackedBatch | PaddedBatch, keepers: dict[int, PackedBatch]
    ) -> list[torch.Tensor]:
        """Run a unit, its prefixes first where a resumed run lacks them; split it when memory runs out."""
        if isinstance(unit, PackedBatch) and not body.has(unit.prefix):
            self._states(body, keepers[unit.prefix], keepers)
        if self._most_tokens is None or unit.n_tokens <= self._most_tokens or not _can_split(unit):
            try:
                return [body.run(unit)]
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error):
                    raise
                if not _can_split(unit):
                    raise UnsupportedError(
                        f"Memory ran out on {unit.n_tokens} tokens: {error}",
                        fix="Use a smaller dtype or another device",
                    ) from error
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._most_tokens = unit.n_tokens // 2
            self.n_splits += 1
            logger.warning("Memory ran out on %d tokens; going on with at most %d", unit.n_tokens, self._most_tokens)
        self._spare -= 1
        spare = self._spare
        states = []
        for part in split(unit, spare):
            states += self._states(body, part, keepers)
        body.forget(spare)
        return states

    def _baseline(
        self, chunk: list[torch.Tensor], rows: slice, found: Ints | None, device: torch.device
    ) -> torch.Tensor | None:
        if isinstance(self.baseline, ModelRunner):
            return self.baseline.head.logits(chunk[1]).to(device)
        if self.baseline is not None and found is not None:
            return self.baseline.logits(found[rows], device)
        return None


def _joined(parts: Sequence[Arrays]) -> Arrays:
    return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}


def _can_split(unit: PackedBatch | PaddedBatch) -> bool:
    return len(unit.sequences) > 1 if isinstance(unit, PaddedBatch) else len(unit.ids) > 1


def _is_out_of_memory(error: Any) -> bool:
    """The CPU's allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
