"""Scores groups of a plan: the body runs unit by unit, the head group by group; results are per row and target."""

import hashlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from mlflow_compress.errors import UnsupportedError, is_no_memory
from mlflow_compress.models.placement import sent_to
from mlflow_compress.scoring.baseline_store import CapturedStates, SentStates, StateStore, StateWriter
from mlflow_compress.scoring.forward.by_layer import BodyByLayer, sweeps
from mlflow_compress.scoring.forward.head import LanguageModelHead
from mlflow_compress.scoring.forward.tree_attention import TreeAttention, install_tree_attention
from mlflow_compress.scoring.journal import Arrays, joined_arrays
from mlflow_compress.scoring.kernels.logit_stats import compute_logit_stats
from mlflow_compress.scoring.kernels.row_stats import DIVERGENCES
from mlflow_compress.scoring.plan.packing import (
    PackedBatch,
    PaddedBatch,
    Plan,
    UnitGroup,
    group_units,
    last_uses,
    split_unit,
)

logger = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]
DISTANCES = (*DIVERGENCES, "same_top", "top10", "rbo10")


@dataclass(frozen=True)
class Targets:
    """Tokens whose log-probability is computed: `token[i]`, predicted at row `row[i]`.

    `row` is sorted, and every row of the plan occurs in it.
    """

    row: Ints
    token: Ints

    @classmethod
    def of(cls, row: Ints, token: Ints) -> "tuple[Targets, Ints]":
        """Return the distinct (row, token) pairs sorted by row, and the index of each given pair among them."""
        pairs, place = np.unique(np.stack([row, token]), axis=1, return_inverse=True)
        return cls(pairs[0], pairs[1]), place.reshape(-1).astype(np.int64)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.row.tobytes() + self.token.tobytes()).hexdigest()

    @cached_property
    def first_tokens(self) -> npt.NDArray[np.int32]:
        _, first = np.unique(self.row, return_index=True)
        return self.token[first].astype(np.int32)


class _StatesBody(Protocol):
    """Interface of a body: `forward.body.Body`, or one that another engine runs."""

    def run(self, unit: PackedBatch | PaddedBatch, attention: TreeAttention | None = None) -> torch.Tensor:
        """Return the head's inputs at the unit's scored positions, in order, shape (k, hidden_size)."""

    def has(self, prefix: int) -> bool:
        """Whether a unit behind this cached prefix can run."""

    def forget(self, prefix: int) -> None:
        """Free a cached prefix that no later unit needs."""

    def clear(self) -> None:
        """Free every cached prefix."""


@dataclass(frozen=True)
class ModelRunner:
    """Runs one model: its body and its head."""

    body: _StatesBody
    head: LanguageModelHead


@dataclass
class ScoringPass:
    """Runs groups of one plan. The results of a group are arrays by name, in the plan's row order.

    ``logprob`` (n_targets,): ln p of each target, in nats, float64. ``argmax`` (n_rows,): the most probable token, at a
    tie the lowest id. With `entropy` also ``entropy`` (n_rows,) in nats. With a baseline also the arrays that
    `DISTANCES` names, each (n_rows,), see `logit_stats.LogitStats`. Where the body has `forms` of its layers, all of
    these are there for each form, under names such as ``0 logprob``.
    """

    runner: ModelRunner  # The model that is scored
    # Most rows per product with the head. It depends on the settings, never on free memory, so that equal states give
    # equal bits.
    head_rows: int
    capture: StateWriter | CapturedStates | None = None  # Receives the head's inputs
    # Stored states, or a model that runs on the same batches as this one
    baseline: StateStore | SentStates | ModelRunner | None = None
    entropy: bool = False  # Whether to compute the entropy of each row
    n_splits: int = field(default=0, init=False)  # How often memory ran out, after which smaller batches were used
    _most_tokens: int | None = field(default=None, init=False)
    _spare: int = field(default=0, init=False)  # prefixes of split units are numbered downwards from -1

    def run(self, plan: Plan, targets: Targets, numbers: Iterable[int] | None = None) -> Iterator[tuple[int, Arrays]]:
        """Yield number and results of the groups with these numbers; None: of all groups of `group_units`."""
        baseline_rows = None
        if self.baseline is not None and not isinstance(self.baseline, ModelRunner):
            baseline_rows = self.baseline.rows_of(plan.keys)
        cut = group_units(plan, self.head_rows)
        last_use = last_uses(plan.units)
        try:
            with install_tree_attention() as attention:
                bodies = [runner.body for runner in self._runners()]
                for sweep in sweeps(bodies, plan, cut, range(len(cut)) if numbers is None else numbers):
                    for body in bodies:
                        if isinstance(body, BodyByLayer):
                            units = [unit for number in sweep for unit in range(len(plan.units))[cut[number].units]]
                            body.prepare(plan, units, attention, last_use)
                    for number in sweep:
                        forms = bodies[0].forms if isinstance(bodies[0], BodyByLayer) else ()
                        if forms:
                            results = self._results_of_forms(plan, cut[number], targets, baseline_rows)
                        else:
                            states = self._states_of(plan, cut[number], attention, last_use)
                            results = self._reduce(plan, cut[number], states, targets, baseline_rows)
                            states.clear()  # they are not kept while the results are used
                        yield number, results
        finally:
            for runner in self._runners():
                runner.body.clear()

    def is_ahead(self) -> bool:
        """Whether groups are computed already that were not asked for yet: they are there at once."""
        return any(isinstance(r.body, BodyByLayer) and r.body.is_ahead for r in self._runners())

    def _runners(self) -> list[ModelRunner]:
        return [self.runner, *([self.baseline] if isinstance(self.baseline, ModelRunner) else [])]

    def _results_of_forms(self, plan: Plan, group: UnitGroup, targets: Targets, baseline_rows: Ints | None) -> Arrays:
        """Return the results of each form of the layers, under their names behind the number of the form."""
        assert isinstance(self.runner.body, BodyByLayer)
        by_form = zip(*map(self.runner.body.run_forms, plan.units[group.units]), strict=True)
        each = (self._reduce(plan, group, [torch.cat(states)], targets, baseline_rows) for states in by_form)
        return {f"{form} {name}": values for form, one in enumerate(each) for name, values in one.items()}

    def _states_of(
        self, plan: Plan, group: UnitGroup, attention: TreeAttention, last_use: dict[int, list[int]]
    ) -> list[torch.Tensor]:
        """Return the head's inputs at the scored positions of a group, of each runner."""
        per_runner: list[list[torch.Tensor]] = [[] for _ in self._runners()]
        for number in range(group.units.start, group.units.stop):
            unit = plan.units[number]
            for states, runner in zip(per_runner, self._runners(), strict=True):
                states += self._states(runner.body, unit, attention, plan)
                for prefix in last_use.get(number, ()):
                    runner.body.forget(prefix)
        return [torch.cat(states) for states in per_runner]

    def _reduce(
        self, plan: Plan, group: UnitGroup, all_states: list[torch.Tensor], targets: Targets, baseline_rows: Ints | None
    ) -> Arrays:
        """Return the results of a group from its states, at most `head_rows` rows at once."""
        parts = []
        for begin in range(0, len(all_states[0]), self.head_rows):
            # Cloned, because a product's rounding may depend on where its input is in memory.
            chunk = [states[begin : begin + self.head_rows].clone() for states in all_states]
            rows = slice(group.rows.start + begin, group.rows.start + begin + len(chunk[0]))
            logits = self.runner.head.logits(chunk[0])
            baseline = None
            if isinstance(self.baseline, ModelRunner):
                baseline = self.baseline.head.logits(chunk[1]).to(logits.device)
            elif self.baseline is not None and baseline_rows is not None:
                baseline = self.baseline.logits(baseline_rows[rows], logits.device)
            start, stop = np.searchsorted(targets.row, [rows.start, rows.stop])
            asked = torch.from_numpy(np.stack([targets.row[start:stop] - rows.start, targets.token[start:stop]]))
            stats = compute_logit_stats(logits, baseline, sent_to(logits.device, asked))
            if self.capture is not None:  # afterwards: it waits until the device has computed everything
                self.capture.append(rows.start, chunk[0], logits, plan.keys[rows], targets.first_tokens[rows])
            results = {"logprob": stats.logprob, "argmax": stats.argmax, **stats.distances}
            if self.entropy:
                results["entropy"] = stats.entropy
            parts.append({name: values.numpy() for name, values in results.items()})
        return joined_arrays(parts)

    def _states(
        self, body: _StatesBody, unit: PackedBatch | PaddedBatch, attention: TreeAttention, plan: Plan
    ) -> list[torch.Tensor]:
        """Run a unit, after its prefix if a resumed run does not have it; split the unit when memory runs out."""
        if isinstance(unit, PackedBatch) and not body.has(unit.prefix):
            self._states(body, plan.makers[unit.prefix], attention, plan)
        if self._most_tokens is None or unit.n_tokens <= self._most_tokens or not _can_split(unit):
            try:
                return [body.run(unit, attention)]
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                if not is_no_memory(error):
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
        for part in split_unit(unit, spare):
            states += self._states(body, part, attention, plan)
        body.forget(spare)
        return states


def _can_split(unit: PackedBatch | PaddedBatch) -> bool:
    return len(unit.sequences) > 1 if isinstance(unit, PaddedBatch) else len(unit.ids) > 1
