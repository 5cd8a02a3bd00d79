"""Units of work: the tokens of one forward pass each, the plan that orders them, and groups that stay together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mlflow_compress.scoring.plan.trie import Ids

Rows = npt.NDArray[np.int64]
NO_PREFIX = 0


@dataclass(frozen=True)
class PackedBatch:
    """Tokens for one forward pass of one row: a part of the trie, spelled in preorder, after a cached prefix.

    Attributes
    ----------
    ids : ndarray of int32, shape (q,)
    positions : ndarray of int32, shape (q,)
        Position of each token in its sequence.
    ends : ndarray of int32, shape (q,)
        Token j is seen by the tokens j .. ends[j] - 1: those of its node from j on, and of everything below it.
    rows : ndarray of int64, shape (k,)
        Scored positions, as indices into the pack, rising.
    prefix : int
        Number of the cached prefix that every token sees; 0 for none.
    keep : int
        Number under which the cache after this pack (a single path) is kept; 0 for none.
    """

    ids: Ids
    positions: Ids
    ends: Ids
    rows: Rows
    prefix: int = NO_PREFIX
    keep: int = NO_PREFIX

    @property
    def n_tokens(self) -> int:
        """Tokens that the model computes."""
        return len(self.ids)

    @property
    def is_path(self) -> bool:
        """Whether the pack spells one path, so that the ordinary causal mask is right."""
        return bool((self.ends == len(self.ids)).all())


@dataclass(frozen=True)
class PaddedBatch:
    """Whole sequences for one forward pass, padded on the right.

    Attributes
    ----------
    sequences : list of ndarray of int32
    rows : list of ndarray of int64
        Scored positions of each sequence, rising.
    """

    sequences: list[Ids]
    rows: list[Rows]

    @property
    def n_tokens(self) -> int:
        """Tokens that the model computes, without padding."""
        return sum(len(s) for s in self.sequences)


@dataclass(frozen=True)
class Plan:
    """Units of work in order, and where each scored position comes out.

    Attributes
    ----------
    units : list of Pack or PaddedBatch
    keys : ndarray of bytes, shape (n_rows, 16)
        Digest of the tokens up to and including each scored position, in the order in which the units yield them.
    sequence_rows : list of ndarray of int64
        Per sequence given, the row of each of its scored positions.
    before : list of PackedBatch
        Of a part of a larger plan: packs outside it that make cached prefixes which it reads. They yield no rows.
    """

    units: Sequence[PackedBatch | PaddedBatch]
    keys: npt.NDArray[np.uint8]
    sequence_rows: list[Rows]
    before: list[PackedBatch] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        """Tokens that the model computes."""
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
        """A hash of everything that decides rounding: equal digests mean equal batches."""
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
class Group:
    """Consecutive units whose rows go through the head together: what is flushed, resumed and shared out whole.

    Attributes
    ----------
    units, rows : slice
        Of the plan's units and rows.
    n_tokens : int
    """

    units: slice
    rows: slice
    n_tokens: int


def groups(plan: Plan, head_rows: int) -> list[Group]:
    """Cut a plan's units into groups that yield at least `head_rows` rows each, the last one apart."""
    out: list[Group] = []
    first = row = n_rows = n_tokens = 0
    for number, unit in enumerate(plan.units):
        n_rows += rows_of(unit)
        n_tokens += unit.n_tokens
        if n_rows >= head_rows or number == len(plan.units) - 1:
            out.append(Group(slice(first, number + 1), slice(row, row + n_rows), n_tokens))
            first, row, n_rows, n_tokens = number + 1, row + n_rows, 0, 0
    return out


def rows_of(unit: PackedBatch | PaddedBatch) -> int:
    """Return how many scored positions a unit yields."""
    return len(unit.rows) if isinstance(unit, PackedBatch) else sum(len(r) for r in unit.rows)


def last_uses(units: Sequence[PackedBatch | PaddedBatch]) -> dict[int, list[int]]:
    """Return, per unit number, the cached prefixes that nothing after it needs."""
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
    """Return a 16-byte digest of ``ids[: row + 1]`` for each of the rising `rows`."""
    h = hashlib.blake2b(digest_size=16)
    raw = ids.astype("<i4").tobytes()
    done, keys = 0, []
    for row in rows.tolist():
        h.update(raw[4 * done : 4 * (row + 1)])
        done = row + 1
        keys.append(h.digest())
    return keys


def split(unit: PackedBatch | PaddedBatch, spare: int) -> list[PackedBatch | PaddedBatch]:
    """Return two units that together yield what `unit` yields, each smaller; for when memory runs out.

    Parameters
    ----------
    unit : PackedBatch or PaddedBatch
        Two tokens or more; a batch needs two sequences.
    spare : int
        A prefix number that nothing else uses, for halves of a single path.
    """
    if isinstance(unit, PaddedBatch):
        half = len(unit.sequences) // 2
        parts = slice(None, half), slice(half, None)
        return [PaddedBatch(unit.sequences[p], unit.rows[p]) for p in parts]
    n = len(unit.ids)
    stem = int(np.cumprod(unit.ends == n).sum())  # leading tokens that all later ones see
    if stem:
        cut = stem if stem < n else n // 2
        return [
            _part(unit, slice(0, cut), prefix=unit.prefix, keep=spare),
            _part(unit, slice(cut, n), prefix=spare, keep=unit.keep),
        ]
    # Tokens that see nothing of the pack before them begin a subtree: cut between two, nearest to the middle.
    begins = np.flatnonzero(np.concatenate([[n], np.maximum.accumulate(unit.ends)[:-1]]) <= np.arange(n))
    cut = int(begins[np.abs(begins - n // 2).argmin()])
    return [
        _part(unit, slice(0, cut), prefix=unit.prefix, keep=NO_PREFIX),
        _part(unit, slice(cut, n), prefix=unit.prefix, keep=NO_PREFIX),
    ]


def _part(unit: PackedBatch, part: slice, *, prefix: int, keep: int) -> PackedBatch:
    rows = unit.rows[(unit.rows >= part.start) & (unit.rows < part.stop)] - part.start
    ends = np.minimum(unit.ends[part], part.stop) - part.start
    return PackedBatch(unit.ids[part], unit.positions[part], ends.astype(np.int32), rows, prefix=prefix, keep=keep)
