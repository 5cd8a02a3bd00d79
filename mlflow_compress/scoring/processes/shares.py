"""Cut a scoring pass into shares for several processes; each share is a plan that can be sent and run on its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlflow_compress.scoring.plan.units import NO_PREFIX, PackedBatch, PaddedBatch, Plan, UnitGroup, group_units
from mlflow_compress.scoring.scoring_pass import Targets


@dataclass(frozen=True)
class Share:
    """Consecutive groups of a plan, as a plan of their own. The same model gives the same rows, bit for bit.

    Attributes
    ----------
    plan : Plan
        Its `before` holds the packs of earlier shares whose cached prefixes are read here.
    targets : Targets
        The targets of its rows, which are numbered from 0.
    """

    plan: Plan
    targets: Targets


def cut_into_shares(plan: Plan, targets: Targets, head_rows: int, n: int) -> list[Share]:
    """Return up to `n` shares with about the same number of tokens, in order; no group of `head_rows` rows is divided.

    A cut is moved where that saves tokens of cached prefixes, which a share has to compute again.
    """
    cut = group_units(plan, head_rows)
    if not cut:
        return [Share(plan, targets)]
    starts = [0, *_cuts(plan, cut, min(n, len(cut)))]
    return [_share(plan, targets, cut[a:b]) for a, b in zip(starts, [*starts[1:], len(cut)], strict=True)]


def _cuts(plan: Plan, cut: Sequence[UnitGroup], n: int) -> list[int]:
    """Return the index of the first group of each share but the first."""
    done = np.cumsum([0, *(g.n_tokens for g in cut)])[:-1]  # tokens before each group
    recomputed = _prefix_tokens(plan)[[g.units.start for g in cut]]
    found: list[int] = []
    for number in range(1, n):
        first = found[-1] + 1 if found else 1
        last = len(cut) - (n - number)
        off = np.abs(done - plan.n_tokens * number / n) + recomputed
        found.append(first + int(off[first : last + 1].argmin()))
    return found


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


def _share(plan: Plan, targets: Targets, part: Sequence[UnitGroup]) -> Share:
    units = plan.units[part[0].units.start : part[-1].units.stop]
    start, stop = part[0].rows.start, part[-1].rows.stop
    first, last = np.searchsorted(targets.row, [start, stop])
    return Share(
        Plan(units, plan.keys[start:stop], [], _before(plan, units)),
        Targets(targets.row[first:last] - start, targets.token[first:last]),
    )


def _before(plan: Plan, units: Sequence[PackedBatch | PaddedBatch]) -> list[PackedBatch]:
    """Return the packs of other shares that make the prefixes which `units` read, and the prefixes of those packs."""
    makers = {u.keep: u for u in plan.units if isinstance(u, PackedBatch) and u.keep != NO_PREFIX}
    own = {u.keep for u in units if isinstance(u, PackedBatch)} | {NO_PREFIX}
    needed: dict[int, PackedBatch] = {}
    for unit in units:
        prefix = unit.prefix if isinstance(unit, PackedBatch) else NO_PREFIX
        while prefix not in own and prefix not in needed:
            needed[prefix] = makers[prefix]
            prefix = makers[prefix].prefix
    return list(needed.values())
