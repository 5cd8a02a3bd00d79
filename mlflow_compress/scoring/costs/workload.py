"""How much a model has to compute for a suite, counted from the very plans that the engine follows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    longest_unit : int
        Most tokens in one forward pass.
    most_cached : int
        Most tokens whose keys and values are in memory at once.
    largest_mask : int
        Most numbers of an attention mask: tokens of a pack by tokens that they could attend to.
    most_rows : int
        Most positions whose logits are there at once.
    """

    tokens: int = 0
    tokens_unshared: int = 0
    pairs: int = 0
    rows: int = 0
    units: int = 0
    longest_unit: int = 0
    most_cached: int = 0
    largest_mask: int = 0
    most_rows: int = 0

    def __add__(self, other: Workload) -> Workload:
        """Return the work of both, one after the other."""
        return Workload(
            tokens=self.tokens + other.tokens,
            tokens_unshared=self.tokens_unshared + other.tokens_unshared,
            pairs=self.pairs + other.pairs,
            rows=self.rows + other.rows,
            units=self.units + other.units,
            longest_unit=max(self.longest_unit, other.longest_unit),
            most_cached=max(self.most_cached, other.most_cached),
            largest_mask=max(self.largest_mask, other.largest_mask),
            most_rows=max(self.most_rows, other.most_rows),
        )


def workload(plan: Plan, tokens_unshared: int, head_rows: int) -> Workload:
    """Return the work of one plan; `tokens_unshared` counts its sequences as they were given.

    The head takes the rows of a group of units together, and at most `head_rows` at once.
    """
    most_cached, largest_mask = _cached_and_masked(plan.units)
    grouped = (group.rows.stop - group.rows.start for group in group_units(plan, head_rows))
    return Workload(
        tokens=plan.n_tokens,
        tokens_unshared=tokens_unshared,
        pairs=sum(_pairs(unit) for unit in plan.units),
        rows=sum(n_scored_rows(unit) for unit in plan.units),
        units=len(plan.units),
        longest_unit=max((_computed(unit) for unit in plan.units), default=0),
        most_cached=most_cached,
        largest_mask=largest_mask,
        most_rows=min(head_rows, max(grouped, default=0)),
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
        longest_unit=max(lengths, default=0),
        most_cached=max(whole, default=0),
        most_rows=min(1, len(lengths)),
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


def _cached_and_masked(units: Sequence[PackedBatch | PaddedBatch]) -> tuple[int, int]:
    """Return `most_cached`, of kept prefixes and those of the running unit, and `largest_mask`."""
    done, size = last_uses(units), {NO_PREFIX: 0}
    most = kept = mask = 0
    for number, unit in enumerate(units):
        running = 0
        if isinstance(unit, PackedBatch):
            # The running unit's cache is a copy of its prefix, and its own tokens.
            running = size[unit.prefix] + unit.n_tokens
            if size[unit.prefix] or not unit.is_path:  # a plain sequence needs no mask
                mask = max(mask, unit.n_tokens * running)
            if unit.keep != NO_PREFIX:
                size[unit.keep] = running
                kept += running
        most = max(most, kept + running)
        kept -= sum(size.pop(prefix) for prefix in done.get(number, ()))
    return most, mask
