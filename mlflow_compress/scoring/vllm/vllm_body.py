"""The body of a model that vLLM runs: units of a plan become requests, whose answers are the head's inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from mlflow_compress.scoring.forward.tree_attention import TreeAttention
from mlflow_compress.scoring.plan.trie import Ids
from mlflow_compress.scoring.plan.units import (
    NO_PREFIX,
    PackedBatch,
    PaddedBatch,
    Plan,
    UnitGroup,
    group_units,
    n_scored_rows,
)

Ask = Callable[[Sequence[Ids], Sequence[Sequence[int]]], torch.Tensor]


@dataclass(frozen=True)
class StatesRequest:
    """A sequence, and its positions whose states are wanted, in ascending order."""

    ids: Ids
    rows: list[int]


def requests_of(unit: PackedBatch | PaddedBatch, makers: dict[int, PackedBatch]) -> list[StatesRequest]:
    """Return the sequences that yield the scored positions of a unit, in its order. None without such a position.

    A pack becomes one request per branch. Neighbours share their beginnings, which vLLM then finds in its cache. A
    position that several branches share is asked of the first one, before it can be in the cache.

    Parameters
    ----------
    unit : PackedBatch or PaddedBatch
    makers : dict
        The packs that make the cached prefixes, by number.
    """
    if isinstance(unit, PaddedBatch):
        pairs = zip(unit.sequences, unit.rows, strict=True)
        return [StatesRequest(ids, rows.tolist()) for ids, rows in pairs if len(rows)]
    before = _prefix(unit.prefix, makers)
    found: list[StatesRequest] = []
    path: list[int] = []
    begin = 0  # the first token that no earlier branch has
    for token, end in enumerate(unit.ends.tolist()):
        while path and unit.ends[path[-1]] <= token:
            path.pop()
        path.append(token)
        if end > token + 1:
            continue  # the branch goes on
        rows = unit.rows[(unit.rows >= begin) & (unit.rows <= token)]
        begin = token + 1
        if len(rows):
            found.append(StatesRequest(np.concatenate([before, unit.ids[path]]), unit.positions[rows].tolist()))
    return found


def _prefix(number: int, makers: dict[int, PackedBatch]) -> Ids:
    """Return all tokens of a cached prefix."""
    parts: list[Ids] = []
    while number != NO_PREFIX:
        parts.append(makers[number].ids)
        number = makers[number].prefix
    return np.concatenate(parts[::-1]) if parts else np.zeros(0, np.int32)


class VllmBody:
    """Yields the states of a plan's units, as `forward.body.Body` does. The next group is computed ahead.

    Parameters
    ----------
    plan : Plan
    head_rows : int
        See `ScoringPass`.
    ask : callable
        From sequences and positions to states, by vLLM.
    """

    def __init__(self, plan: Plan, head_rows: int, ask: Ask) -> None:
        self._plan, self._ask = plan, ask
        self._groups = group_units(plan, head_rows)
        self._group_of = {
            id(plan.units[unit]): number
            for number, group in enumerate(self._groups)
            for unit in range(group.units.start, group.units.stop)
        }
        self._makers = {
            u.keep: u for u in (*plan.before, *plan.units) if isinstance(u, PackedBatch) and u.keep != NO_PREFIX
        }
        self._pool = ThreadPoolExecutor(1)
        self._asked: dict[int, Future[dict[int, torch.Tensor]]] = {}

    def run(self, unit: PackedBatch | PaddedBatch, attention: TreeAttention | None = None) -> torch.Tensor:
        """Return the head's inputs at the unit's scored positions, in order, shape (k, hidden_size)."""
        number = self._group_of[id(unit)]
        for wanted in range(number, min(number + 2, len(self._groups))):
            if wanted not in self._asked:
                self._asked[wanted] = self._pool.submit(self._states, self._groups[wanted])
        for done in [n for n in self._asked if n < number]:
            del self._asked[done]
        return self._asked[number].result()[id(unit)]

    def has(self, prefix: int) -> bool:
        """Return True: vLLM computes a prefix again where its cache has lost it."""
        return True

    def forget(self, prefix: int) -> None:
        """Do nothing: vLLM frees its cache itself."""

    def clear(self) -> None:
        """Let go of everything that nobody has taken."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def busy(self) -> bool:
        """Whether vLLM computes something that nobody waits for."""
        return any(not future.done() for future in self._asked.values())

    def _states(self, group: UnitGroup) -> dict[int, torch.Tensor]:
        units = [self._plan.units[number] for number in range(group.units.start, group.units.stop)]
        requests = [request for unit in units for request in requests_of(unit, self._makers)]
        states = self._ask([request.ids for request in requests], [request.rows for request in requests])
        parts = torch.split(states, [n_scored_rows(unit) for unit in units])
        return {id(unit): part for unit, part in zip(units, parts, strict=True)}
