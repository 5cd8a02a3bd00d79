"""Cut a pass into shares for several processes: each a plan of its own, that can be sent away and run alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlflow_compress.scoring.plan.units import NO_PREFIX, Group, PackedBatch, PaddedBatch, Plan, groups
from mlflow_compress.scoring.scoring_pass import Targets


@dataclass(frozen=True)
class Share:
    """Consecutive groups of a plan, as a plan: with the same model it gives these groups' rows, bit for bit.

    Attributes
    ----------
    plan : Plan
        Its `before` holds the packs whose cached prefixes are read here but belong to earlier shares.
    targets : Targets
        Those of its rows, which are counted from 0.
    """

    plan: Plan
    targets: Targets


def shares(plan: Plan, targets: Targets, head_rows: int, n: int) -> list[Share]:
    """Return up to `n` shares of about equally many tokens, in order; no group of `head_rows` rows is divided.

    A cut moves off the even division where fewer tokens of cached prefixes have then to be computed again.
    """
    cut = groups(plan, head_rows)
    if not cut:
        return [Share(plan, targets)]
    starts = [0, *_cuts(plan, cut, min(n, len(cut)))]
    return [_share(plan, targets, cut[a:b]) for a, b in zip(starts, [*starts[1:], len(cut)], strict=True)]


def _cuts(plan: Plan, cut: Sequence[Group], n: int) -> list[int]:
    """Return the groups with which the shares after the first begin."""
    done = np.cumsum([0, *(g.n_tokens for g in cut)])[:-1]  # tokens before each group
    again = _prefix_tokens(plan)[[g.units.start for g in cut]]
    found: list[int] = []
    for number in range(1, n):
        first = found[-1] + 1 if found else 1
        last = len(cut) - (n - number)
        off = np.abs(done - plan.n_tokens * number / n) + again
        found.append(first + int(off[first : last + 1].argmin()))
    return found


def _prefix_tokens(plan: Plan) -> npt.NDArray[np.int64]:
    """Return, per unit, the tokens of cached prefixes that it or a later unit reads and an earlier one has made."""
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


def _share(plan: Plan, targets: Targets, part: Sequence[Group]) -> Share:
    units = plan.units[part[0].units.start : part[-1].units.stop]
    start, stop = part[0].rows.start, part[-1].rows.stop
    first, last = np.searchsorted(targets.row, [start, stop])
    return Share(
        Plan(units, plan.keys[start:stop], [], _before(plan, units)),
        Targets(targets.row[first:last] - start, targets.token[first:last]),
    )


def _before(plan: Plan, units: Sequence[PackedBatch | PaddedBatch]) -> list[PackedBatch]:
    """Return the packs that make the prefixes which `units` read and do not make, and those that these read."""
    makers = {u.keep: u for u in plan.units if isinstance(u, PackedBatch) and u.keep != NO_PREFIX}
    own = {u.keep for u in units if isinstance(u, PackedBatch)} | {NO_PREFIX}
    needed: dict[int, PackedBatch] = {}
    for unit in units:
        prefix = unit.prefix if isinstance(unit, PackedBatch) else NO_PREFIX
        while prefix not in own and prefix not in needed:
            needed[prefix] = makers[prefix]
            prefix = makers[prefix].prefix
    return list(needed.values())
