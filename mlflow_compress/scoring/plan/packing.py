"""Packs token sequences into units of work (the tokens of one forward pass each), and orders them in a plan.

A plan depends only on the token sequences, the scored positions and the limits given here. It does not depend on the
order of the requests or on the machine. So a baseline and a variant have the same batches, and equal weights give equal
bits.
"""

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


@dataclass(slots=True)
class Node:
    """A run of tokens below its parent: the tokens `start` .. `end` (exclusive) of sequence number `seq`."""

    start: int
    end: int
    seq: int
    parent: int
    children: list[int]


@dataclass(frozen=True)
class Trie:
    """Distinct token sequences in lexicographic order, and the nodes of their trie."""

    sequences: list[Ids]  # Distinct and sorted, so that the order in which they were given has no effect
    nodes: list[Node]  # Node 0 is the root and has no tokens
    terminal: list[int]  # Per sequence, the node with which it ends

    def tokens(self, node: int) -> Ids:
        """Return the tokens of `node`."""
        n = self.nodes[node]
        return self.sequences[n.seq][n.start : n.end]

    def preorder(self) -> list[int]:
        """Return all nodes but the root, parents before children, children in token order."""
        order: list[int] = []
        stack = list(reversed(self.nodes[0].children))
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(reversed(self.nodes[node].children))
        return order

    def subtree_sizes(self) -> list[int]:
        """Return, per node, the number of tokens of it and of all nodes below it."""
        sizes = [n.end - n.start for n in self.nodes]
        for node in reversed(self.preorder()):
            sizes[self.nodes[node].parent] += sizes[node]
        return sizes


def sequence_key(ids: Ids) -> bytes:
    """Return bytes that sort as the token ids do (ids are not negative)."""
    return ids.astype(">i4").tobytes()


def build_trie(sequences: Sequence[Ids]) -> Trie:
    """Return the compressed trie of sequences.

    Each is an int32 array of length >= 1; any order, repetitions allowed.
    """
    distinct = {sequence_key(ids): ids for ids in sequences}
    ordered = [distinct[key] for key in sorted(distinct)]
    nodes = [Node(0, 0, 0, 0, [])]
    terminal: list[int] = []
    stack = [0]
    for number, ids in enumerate(ordered):
        shared = _common_prefix(ordered[number - 1], ids) if number else 0
        last = 0
        while nodes[stack[-1]].end > shared:
            last = stack.pop()
        top = stack[-1]
        if nodes[top].end < shared:  # the branch point is inside `last`: split it there
            middle = len(nodes)
            nodes.append(Node(nodes[top].end, shared, nodes[last].seq, top, [last]))
            nodes[top].children[-1] = middle
            nodes[last].parent, nodes[last].start = middle, shared
            stack.append(middle)
            top = middle
        leaf = len(nodes)
        nodes.append(Node(shared, len(ids), number, top, []))
        nodes[top].children.append(leaf)
        stack.append(leaf)
        terminal.append(leaf)
    return Trie(ordered, nodes, terminal)


def _common_prefix(a: Ids, b: Ids) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


@dataclass
class _Layout:
    """Scored positions of a trie, by node and by sequence, as offsets from the start of the sequence."""

    trie: Trie
    of_node: dict[int, set[int]] = field(default_factory=dict)
    of_sequence: list[list[tuple[int, int]]] = field(default_factory=list)

    @classmethod
    def of(cls, sequences: Sequence[Ids], n_scored: Sequence[int]) -> _Layout:
        trie = build_trie(sequences)
        number = {sequence_key(ids): n for n, ids in enumerate(trie.sequences)}
        layout = cls(trie)
        known: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for ids, count in zip(sequences, n_scored, strict=True):
            which = number[sequence_key(ids)]
            places = known.get((which, count))
            if places is None:
                places = known[which, count] = layout._places(which, count)
            layout.of_sequence.append(places)
        return layout

    def _places(self, sequence: int, count: int) -> list[tuple[int, int]]:
        node, places = self.trie.terminal[sequence], []
        for depth in range(len(self.trie.sequences[sequence]) - 1, len(self.trie.sequences[sequence]) - 1 - count, -1):
            while self.trie.nodes[node].start > depth:
                node = self.trie.nodes[node].parent
            places.append((node, depth))
            self.of_node.setdefault(node, set()).add(depth)
        return places[::-1]


class _Output:
    """Numbers the scored positions in the order in which the units yield them."""

    def __init__(self, layout: _Layout) -> None:
        self.layout = layout
        self.row: dict[tuple[int, int], int] = {}
        self.keys: list[bytes] = []

    def add(self, node: int) -> list[int]:
        """Number the scored positions of `node`, and return their depths; none if they have numbers already."""
        depths = sorted(self.layout.of_node.get(node, ()))
        if not depths or (node, depths[0]) in self.row:
            return []
        for depth in depths:
            self.row[node, depth] = len(self.row)
        sequence = self.layout.trie.sequences[self.layout.trie.nodes[node].seq]
        self.keys += prefix_keys(sequence, np.asarray(depths, dtype=np.int64))
        return depths

    def plan(self, units: Sequence[PackedBatch | PaddedBatch]) -> Plan:
        keys = np.frombuffer(b"".join(self.keys), dtype=np.uint8).reshape(-1, 16)
        rows = [np.asarray([self.row[p] for p in places], dtype=np.int64) for places in self.layout.of_sequence]
        return Plan(units, keys, rows)


def plan_batches(sequences: Sequence[Ids], n_scored: Sequence[int], *, batch_tokens: int) -> Plan:
    """Return a plan of padded batches, the longest sequences first. A prefix of another sequence is not run again.

    `n_scored` counts the scored positions at the end of each sequence. `batch_tokens` is the most tokens per batch,
    padding included; a single longer sequence is a batch of its own.
    """
    layout = _Layout.of(sequences, n_scored)
    trie, out = layout.trie, _Output(layout)
    ends = [(s, node) for s, node in enumerate(trie.terminal) if not trie.nodes[node].children]
    ends.sort(key=lambda end: (-len(trie.sequences[end[0]]), end[0]))
    units: list[PaddedBatch] = []
    while ends:
        n_rows = max(1, batch_tokens // len(trie.sequences[ends[0][0]]))
        taken, ends = ends[:n_rows], ends[n_rows:]
        rows = []
        for _, end in taken:
            path, node = [], end
            while node:
                path.append(node)
                node = trie.nodes[node].parent
            rows.append(np.asarray([d for n in reversed(path) for d in out.add(n)], dtype=np.int64))
        units.append(PaddedBatch([trie.sequences[s] for s, _ in taken], rows))
    return out.plan(units)


def plan_packs(sequences: Sequence[Ids], n_scored: Sequence[int], *, batch_tokens: int, min_shared: int = 16) -> Plan:
    """Return a plan of packed batches in which every shared prefix is computed once.

    A subtree of the prefix trie that fits goes into one pack. For a larger subtree, the stem is computed on its own and
    cached, if it has at least `min_shared` tokens; a shorter stem is computed again in each pack.

    A single path longer than `batch_tokens` is a pack of its own.
    """
    layout = _Layout.of(sequences, n_scored)
    return _Packer(layout, batch_tokens, min_shared).plan()


class _Packer:
    def __init__(self, layout: _Layout, batch_tokens: int, min_shared: int) -> None:
        self.trie = layout.trie
        self.out = _Output(layout)
        self.sizes = self.trie.subtree_sizes()
        self.limit, self.min_shared = batch_tokens, min_shared
        self.units: list[PackedBatch] = []
        self.n_prefixes = 0
        # Per prefix in use, the nodes collected for its next pack, in preorder.
        self.open: dict[int, dict[int, None]] = {NO_PREFIX: {}}
        self.filled: dict[int, int] = {NO_PREFIX: 0}

    def plan(self) -> Plan:
        """Visit the trie in preorder; the stack holds nodes to visit and prefixes to close."""
        stack: list[tuple[int, int, tuple[int, ...]]] = [
            (child, NO_PREFIX, ()) for child in reversed(self.trie.nodes[0].children)
        ]
        closing = -1
        while stack:
            node, prefix, stem = stack.pop()
            if node == closing:
                self._flush(prefix)
                continue
            children = self.trie.nodes[node].children
            stem_size = sum(self._length(n) for n in stem)
            if not children or self.sizes[node] + stem_size <= self.limit:
                self._gather(node, prefix, stem)
                continue
            stem = (*stem, node)
            stem_size += self._length(node)
            if stem_size >= self.min_shared:
                prefix, stem = self._cache(stem, prefix), ()
                stack.append((closing, prefix, ()))
            stack.extend((child, prefix, stem) for child in reversed(children))
        self._flush(NO_PREFIX)
        return self.out.plan(self.units)

    def _length(self, node: int) -> int:
        return self.trie.nodes[node].end - self.trie.nodes[node].start

    def _subtree(self, node: int) -> list[int]:
        nodes, stack = [], [node]
        while stack:
            n = stack.pop()
            nodes.append(n)
            stack.extend(reversed(self.trie.nodes[n].children))
        return nodes

    def _gather(self, node: int, prefix: int, stem: tuple[int, ...]) -> None:
        nodes = self.open[prefix]
        new = self.sizes[node] + sum(self._length(n) for n in stem if n not in nodes)
        if nodes and self.filled[prefix] + new > self.limit:
            self._flush(prefix)
            new = self.sizes[node] + sum(self._length(n) for n in stem)
        self.open[prefix].update(dict.fromkeys((*stem, *self._subtree(node))))
        self.filled[prefix] += new

    def _cache(self, path: tuple[int, ...], prefix: int) -> int:
        self.n_prefixes += 1
        self.units.append(self._pack(list(path), prefix, self.n_prefixes))
        self.open[self.n_prefixes], self.filled[self.n_prefixes] = {}, 0
        return self.n_prefixes

    def _flush(self, prefix: int) -> None:
        if self.open[prefix]:
            self.units.append(self._pack(list(self.open[prefix]), prefix, NO_PREFIX))
        self.open[prefix], self.filled[prefix] = {}, 0

    def _pack(self, nodes: list[int], prefix: int, keep: int) -> PackedBatch:
        starts: dict[int, int] = {}
        rows: list[int] = []
        size = 0
        for node in nodes:
            starts[node] = size
            rows += [size + depth - self.trie.nodes[node].start for depth in self.out.add(node)]
            size += self._length(node)
        ends = {node: starts[node] + self._length(node) for node in nodes}
        for node in reversed(nodes):
            parent = self.trie.nodes[node].parent
            if parent in ends:
                ends[parent] = max(ends[parent], ends[node])
        lengths = [self._length(n) for n in nodes]
        return PackedBatch(
            ids=np.concatenate([self.trie.tokens(n) for n in nodes]),
            positions=np.concatenate(
                [np.arange(self.trie.nodes[n].start, self.trie.nodes[n].end, dtype=np.int32) for n in nodes]
            ),
            ends=np.repeat(np.asarray([ends[n] for n in nodes], dtype=np.int32), lengths),
            rows=np.asarray(rows, dtype=np.int64),
            prefix=prefix,
            keep=keep,
        )
