"""Cuts a scoring pass into shards; each is a plan of its own, which can be sent away and computed alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mlflow_compress.scoring.plan.packing import NO_PREFIX, PackedBatch, Plan, UnitGroup, group_units
from mlflow_compress.scoring.scoring_pass import Targets

_PER_WORKER = (16, 8, 4, 2, 1)
_MOST_AGAIN = 0.05


@dataclass(frozen=True)
class Shard:
    """Consecutive groups of a plan, as a plan of their own. The same model gives the same rows, bit for bit."""

    first: int  # The groups `first` to `stop` - 1 of the whole plan
    stop: int
    rows: slice  # Its rows in the whole plan
    n_tokens: int
    plan: Plan  # Its `before` holds the packs of earlier shards whose cached prefixes are read here
    targets: Targets  # The targets of its rows, which are numbered from 0


def shards_for(plan: Plan, targets: Targets, head_rows: int, missing: Sequence[int], n_workers: int) -> list[Shard]:
    """Return the groups `missing` in shards: up to 16 per worker, as long as little is computed twice for them.

    Small shards cost little when a worker is lost, and end at about the same time. But the shards of one subject all
    compute its few-shot examples again. So there are fewer of them, down to one per worker, where that would be more
    than 5 % of all tokens.
    """
    shards: list[Shard] = []
    for per_worker in _PER_WORKER:
        shards = cut_into_shards(plan, targets, head_rows, missing, per_worker * n_workers)
        again = sum(pack.n_tokens for shard in shards for pack in shard.plan.before)
        if again <= _MOST_AGAIN * sum(shard.n_tokens for shard in shards):
            break
    return shards


def cut_into_shards(plan: Plan, targets: Targets, head_rows: int, missing: Sequence[int], n: int) -> list[Shard]:
    """Return about `n` shards with about as many tokens each, which together are the groups `missing`, in order.

    No group of `head_rows` rows is divided. A cut is moved where that saves tokens of cached prefixes, which a shard
    has to compute again.
    """
    groups = group_units(plan, head_rows)
    recomputed = _prefix_tokens(plan)[[group.units.start for group in groups]]
    n_tokens = sum(groups[number].n_tokens for number in missing)
    shards = []
    for run in _runs(missing):
        part = groups[run.start : run.stop]
        share = sum(group.n_tokens for group in part) / n_tokens
        n_here = min(max(1, round(n * share)), len(part))
        starts = [0, *_cuts(part, recomputed[run.start : run.stop], n_here), len(part)]
        shards += [_shard(plan, targets, part[a:b], run.start + a) for a, b in pairwise(starts)]
    return shards


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Yield the ranges of consecutive numbers, in ascending order."""
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield range(numbers[start], numbers[i - 1] + 1)
            start = i


def _cuts(part: Sequence[UnitGroup], recomputed: npt.NDArray[np.int64], n: int) -> list[int]:
    """Return the index of the first group of each shard but the first."""
    done = np.cumsum([0, *(group.n_tokens for group in part)])  # tokens before each group
    cuts: list[int] = []
    for number in range(1, n):
        first = cuts[-1] + 1 if cuts else 1
        last = len(part) - (n - number)
        off = np.abs(done[:-1] - done[-1] * number / n) + recomputed
        cuts.append(first + int(off[first : last + 1].argmin()))
    return cuts


def _prefix_tokens(plan: Plan) -> npt.NDArray[np.int64]:
    """Return, per unit, the tokens of cached prefixes that an earlier unit makes and this or a later unit reads."""
    change = np.zeros(len(plan.units) + 1, dtype=np.int64)
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, unit in enumerate(plan.units):
        if isinstance(unit, PackedBatch):
            if unit.keep != NO_PREFIX:
                made[unit.keep] = number
            if unit.prefix != NO_PREFIX:
                last[unit.prefix] = number
    for prefix, number in last.items():
        n_tokens = plan.units[made[prefix]].n_tokens
        change[made[prefix] + 1] += n_tokens
        change[number + 1] -= n_tokens
    return np.cumsum(change)[:-1]


def _shard(plan: Plan, targets: Targets, part: Sequence[UnitGroup], first: int) -> Shard:
    units = plan.units[part[0].units.start : part[-1].units.stop]
    rows = slice(part[0].rows.start, part[-1].rows.stop)
    begin, end = np.searchsorted(targets.row, [rows.start, rows.stop])
    # The packs of other shards that make the prefixes which these units read, and the prefixes of those packs.
    made = {u.keep for u in units if isinstance(u, PackedBatch)} | {NO_PREFIX}
    needed: dict[int, PackedBatch] = {}
    for unit in units:
        prefix = unit.prefix if isinstance(unit, PackedBatch) else NO_PREFIX
        while prefix not in made and prefix not in needed:
            needed[prefix] = plan.makers[prefix]
            prefix = plan.makers[prefix].prefix
    return Shard(
        first=first,
        stop=first + len(part),
        rows=rows,
        n_tokens=sum(group.n_tokens for group in part),
        plan=Plan(units, plan.keys[rows], [], list(needed.values())),
        targets=Targets(targets.row[begin:end] - rows.start, targets.token[begin:end]),
    )
