"""Packs token sequences into batches, and records which of their positions are scored.

A plan depends only on the token sequences, the scored positions and the limits given here. It does not depend on the
order of the requests or on the machine. So a baseline and a variant have the same batches, and equal weights give equal
bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mlflow_compress.scoring.plan.units import NO_PREFIX, Ids, PackedBatch, PaddedBatch, Plan, prefix_keys


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
