"""How much a model has to compute for a suite, counted from the very plans that the engine follows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mlflow_compress.scoring.plan.units import (
    NO_PREFIX,
    PackedBatch,
    PaddedBatch,
    Plan,
    group_units,
    last_uses,
    n_scored_rows,
)


@dataclass(frozen=True, kw_only=True)
class GroupSize:
    """What a group of forward passes holds at most; the head takes its rows together.

    Attributes
    ----------
    longest_unit : int
        Most tokens in one forward pass.
    most_cached : int
        Most tokens whose keys and values are in memory at once.
    largest_mask : int
        Most numbers of an attention mask: tokens of a pack by tokens that they could attend to.
    rows : int
        Positions whose logits are there at once.
    """

    longest_unit: int = 0
    most_cached: int = 0
    largest_mask: int = 0
    rows: int = 0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Amounts of work of one or more passes.

    Attributes
    ----------
    tokens : int
        Tokens that the body computes.
    tokens_unshared : int
        The same if no prefix were shared: what other tools compute.
    pairs : int
        Pairs of a token and a token that it attends to.
    rows : int
        Positions at which the head runs, and whose states a baseline stores.
    units : int
        Forward passes.
    groups : tuple of GroupSize
        In the order in which they run.
    """

    tokens: int = 0
    tokens_unshared: int = 0
    pairs: int = 0
    rows: int = 0
    units: int = 0
    groups: tuple[GroupSize, ...] = ()

    def __add__(self, other: Workload) -> Workload:
        """Return the work of both, one after the other."""
        return Workload(
            tokens=self.tokens + other.tokens,
            tokens_unshared=self.tokens_unshared + other.tokens_unshared,
            pairs=self.pairs + other.pairs,
            rows=self.rows + other.rows,
            units=self.units + other.units,
            groups=self.groups + other.groups,
        )


def workload(plan: Plan, tokens_unshared: int, head_rows: int) -> Workload:
    """Return the work of one plan; `tokens_unshared` counts its sequences as they were given.

    The head takes the rows of a group of units together, and at most `head_rows` at once.
    """
    return Workload(
        tokens=plan.n_tokens,
        tokens_unshared=tokens_unshared,
        pairs=sum(_pairs(unit) for unit in plan.units),
        rows=sum(n_scored_rows(unit) for unit in plan.units),
        units=len(plan.units),
        groups=tuple(_group_sizes(plan, head_rows)),
    )


def generation_workload(prompt_lengths: Iterable[int], new_tokens: int) -> Workload:
    """Return the work of one answer to each prompt, if every answer has the greatest length."""
    lengths = list(prompt_lengths)
    whole = [n + new_tokens for n in lengths]
    return Workload(
        tokens=sum(whole),
        tokens_unshared=sum(whole),
        pairs=sum(n * (n + 1) // 2 for n in whole),
        rows=new_tokens * len(lengths),
        units=len(lengths),
        groups=tuple(GroupSize(longest_unit=n, most_cached=n + new_tokens, rows=1) for n in lengths),
    )


def _pairs(unit: PackedBatch | PaddedBatch) -> int:
    if isinstance(unit, PackedBatch):
        return int((unit.positions.astype("int64") + 1).sum())
    return sum(len(ids) * (len(ids) + 1) // 2 for ids in unit.sequences)


def _computed(unit: PackedBatch | PaddedBatch) -> int:
    """Return the tokens of a forward pass, padding included."""
    if isinstance(unit, PackedBatch):
        return unit.n_tokens
    return len(unit.sequences) * max(len(ids) for ids in unit.sequences)


def _group_sizes(plan: Plan, head_rows: int) -> Iterator[GroupSize]:
    """Yield what each group holds: of kept prefixes, and of the unit that runs."""
    done, size, kept = last_uses(plan.units), {NO_PREFIX: 0}, 0
    for group in group_units(plan, head_rows):
        longest = most = mask = 0
        for number in range(group.units.start, group.units.stop):
            unit, running = plan.units[number], 0
            if isinstance(unit, PackedBatch):
                # The running unit's cache is a copy of its prefix, and its own tokens.
                running = size[unit.prefix] + unit.n_tokens
                if size[unit.prefix] or not unit.is_path:  # a plain sequence needs no mask
                    mask = max(mask, unit.n_tokens * running)
                if unit.keep != NO_PREFIX:
                    size[unit.keep] = running
                    kept += running
            longest, most = max(longest, _computed(unit)), max(most, kept + running)
            kept -= sum(size.pop(prefix) for prefix in done.get(number, ()))
        rows = min(head_rows, group.rows.stop - group.rows.start)
        yield GroupSize(longest_unit=longest, most_cached=most, largest_mask=mask, rows=rows)
