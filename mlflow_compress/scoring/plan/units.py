"""Units of work (the tokens of one forward pass each), the plan that orders them, and groups of units."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]
NO_PREFIX = 0
_MOST_UNITS = 8  # in a group


@dataclass(frozen=True)
class PackedBatch:
    """Several branches of the prefix trie in one row, in preorder, after a cached prefix; one forward pass."""

    ids: Ids  # shape (q,)
    positions: Ids  # Position of each token in its sequence; shape (q,)
    # Token j is seen by the tokens j .. ends[j] - 1: the rest of its node, and all nodes below it; shape (q,)
    ends: Ids
    rows: Rows  # Scored positions, as indices into the pack, in ascending order; shape (k,)
    prefix: int = NO_PREFIX  # Number of the cached prefix that every token sees; 0 for none
    # Number under which the keys and values after this pack (a single path) are cached; 0: they are not
    keep: int = NO_PREFIX

    @property
    def n_tokens(self) -> int:
        """Number of tokens that the model computes."""
        return len(self.ids)

    @property
    def is_path(self) -> bool:
        """Whether the pack is a single path, for which the ordinary causal mask is right."""
        return bool((self.ends == len(self.ids)).all())


@dataclass(frozen=True)
class PaddedBatch:
    """Complete sequences for one forward pass, padded on the right."""

    sequences: list[Ids]
    rows: list[Rows]  # Scored positions of each sequence, in ascending order

    @property
    def n_tokens(self) -> int:
        """Number of tokens that the model computes, without padding."""
        return sum(len(s) for s in self.sequences)


@dataclass(frozen=True)
class Plan:
    """Units of work in order, and the result row of each scored position."""

    units: Sequence[PackedBatch | PaddedBatch]
    # One per result row: digest of the tokens up to and including the scored position; shape (n_rows, 16)
    keys: npt.NDArray[np.uint8]
    sequence_rows: list[Rows]  # Per sequence given, the row of each of its scored positions
    # Only for a part of a larger plan: packs of earlier parts whose cached prefixes it reads. They yield no rows.
    before: list[PackedBatch] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        """Number of tokens that the model computes."""
        return sum(u.n_tokens for u in self.units)

    @property
    def max_length(self) -> int:
        """Length of the longest sequence."""
        longest = 0
        for unit in self.units:
            lengths = (
                [len(s) for s in unit.sequences] if isinstance(unit, PaddedBatch) else [int(unit.positions.max()) + 1]
            )
            longest = max(longest, *lengths)
        return longest

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all batches: with equal digests, equal weights give equal bits."""
        h = hashlib.sha256()
        for unit in self.units:
            if isinstance(unit, PackedBatch):
                h.update(f"pack {unit.prefix} {unit.keep} {len(unit.ids)} {len(unit.rows)};".encode())
                parts: list[npt.NDArray[Any]] = [unit.ids, unit.positions, unit.ends, unit.rows]
            else:
                h.update(f"batch {[len(s) for s in unit.sequences]} {[len(r) for r in unit.rows]};".encode())
                parts = [*unit.sequences, *unit.rows]
            for part in parts:
                h.update(part.tobytes())
        return h.hexdigest()


@dataclass(frozen=True)
class UnitGroup:
    """Consecutive units whose rows go through the head together. A group is never divided between runs or processes."""

    units: slice  # Range of the plan's units, and of its rows
    rows: slice
    n_tokens: int


def group_units(plan: Plan, head_rows: int) -> list[UnitGroup]:
    """Return groups of consecutive units, in order.

    A group ends where it yields `head_rows` rows or more, and where it has `_MOST_UNITS` units; the last has the rest.
    Where a unit yields few rows (one for each question with lettered options), the second rule keeps groups small
    enough to be shared out.
    """
    out: list[UnitGroup] = []
    first = row = n_rows = n_tokens = 0
    for number, unit in enumerate(plan.units):
        n_rows += n_scored_rows(unit)
        n_tokens += unit.n_tokens
        if n_rows >= head_rows or number + 1 - first == _MOST_UNITS or number == len(plan.units) - 1:
            out.append(UnitGroup(slice(first, number + 1), slice(row, row + n_rows), n_tokens))
            first, row, n_rows, n_tokens = number + 1, row + n_rows, 0, 0
    return out


def n_scored_rows(unit: PackedBatch | PaddedBatch) -> int:
    """Return the number of scored positions of a unit."""
    return len(unit.rows) if isinstance(unit, PackedBatch) else sum(len(r) for r in unit.rows)


def last_uses(units: Sequence[PackedBatch | PaddedBatch]) -> dict[int, list[int]]:
    """Return, by unit number, the cached prefixes that no later unit needs."""
    last: dict[int, int] = {}
    for number, unit in enumerate(units):
        if isinstance(unit, PackedBatch):
            for prefix in (unit.prefix, unit.keep):
                if prefix != NO_PREFIX:
                    last[prefix] = number
    done: dict[int, list[int]] = {}
    for prefix, number in last.items():
        done.setdefault(number, []).append(prefix)
    return done


def prefix_keys(ids: Ids, rows: Rows) -> list[bytes]:
    """Return a 16-byte digest of ``ids[: row + 1]`` for each of `rows`, which are in ascending order."""
    h = hashlib.blake2b(digest_size=16)
    raw = ids.astype("<i4").tobytes()
    done, keys = 0, []
    for row in rows.tolist():
        h.update(raw[4 * done : 4 * (row + 1)])
        done = row + 1
        keys.append(h.digest())
    return keys


def split_unit(unit: PackedBatch | PaddedBatch, spare: int) -> list[PackedBatch | PaddedBatch]:
    """Return two smaller units that together yield the rows of `unit`; used when memory runs out.

    `spare` is an unused prefix number, for the case that a single path is cut in two.
    """
    if isinstance(unit, PaddedBatch):
        half = len(unit.sequences) // 2
        parts = slice(None, half), slice(half, None)
        return [PaddedBatch(unit.sequences[p], unit.rows[p]) for p in parts]
    n = len(unit.ids)
    stem = int(np.cumprod(unit.ends == n).sum())  # leading tokens that all later tokens see
    if stem:
        cut = stem if stem < n else n // 2
        return [
            _slice_pack(unit, slice(0, cut), prefix=unit.prefix, keep=spare),
            _slice_pack(unit, slice(cut, n), prefix=spare, keep=unit.keep),
        ]
    # A token that sees no earlier token of the pack begins a subtree: cut at the subtree nearest to the middle.
    begins = np.flatnonzero(np.concatenate([[n], np.maximum.accumulate(unit.ends)[:-1]]) <= np.arange(n))
    cut = int(begins[np.abs(begins - n // 2).argmin()])
    return [
        _slice_pack(unit, slice(0, cut), prefix=unit.prefix, keep=NO_PREFIX),
        _slice_pack(unit, slice(cut, n), prefix=unit.prefix, keep=NO_PREFIX),
    ]


def _slice_pack(unit: PackedBatch, part: slice, *, prefix: int, keep: int) -> PackedBatch:
    rows = unit.rows[(unit.rows >= part.start) & (unit.rows < part.stop)] - part.start
    ends = np.minimum(unit.ends[part], part.stop) - part.start
    return PackedBatch(unit.ids[part], unit.positions[part], ends.astype(np.int32), rows, prefix=prefix, keep=keep)
