"""Packs token sequences into units of work (the tokens of one forward pass each), and orders them in a plan.

A plan depends only on the token sequences, the scored positions and the limits given here. It does not depend on the
order of the requests or on the machine. So a baseline and a variant have the same batches, and equal weights give equal
bits.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mlflow_compress.models.length_regimes import BASE, LengthRegime, one_regime

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
        return sum(len(s) for s in self.sequences)


@dataclass(frozen=True)
class Plan:
    """Units of work in order, and the result row of each scored position."""

    units: Sequence[PackedBatch | PaddedBatch]
    # One per result row: digest of the tokens up to and including the scored position, and of the sequence's regime;
    # shape (n_rows, 16)
    keys: npt.NDArray[np.uint8]
    sequence_rows: list[Rows]  # Per sequence given, the row of each of its scored positions
    # Only for a part of a larger plan: packs of earlier parts whose cached prefixes it reads. They yield no rows.
    before: list[PackedBatch] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return sum(u.n_tokens for u in self.units)

    @cached_property
    def makers(self) -> dict[int, PackedBatch]:
        """The packs that make the cached prefixes, by number."""
        packs = (unit for unit in (*self.before, *self.units) if isinstance(unit, PackedBatch))
        return {pack.keep: pack for pack in packs if pack.keep != NO_PREFIX}

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


def n_computed(unit: PackedBatch | PaddedBatch) -> int:
    """Return the tokens of a unit's forward pass, padding included."""
    return unit.n_tokens if isinstance(unit, PackedBatch) else len(unit.sequences) * max(map(len, unit.sequences))


def n_states(unit: PackedBatch | PaddedBatch) -> int:
    """Return how many hidden states a sweep through the layers keeps of a unit; a prefix's keys and values count too.

    These are those of one layer, and each as wide as a state at most.
    """
    return n_computed(unit) * (3 if isinstance(unit, PackedBatch) and unit.keep != NO_PREFIX else 1)


def cut_to_fit(sizes: Iterable[int], most: int) -> Iterator[slice]:
    """Yield ranges of consecutive sizes that fit together into `most`, and at least one each."""
    first = end = total = 0
    for end, size in enumerate(sizes, 1):
        if total + size > most and end - 1 > first:
            yield slice(first, end - 1)
            first, total = end - 1, 0
        total += size
    if end:
        yield slice(first, end)


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


def prefix_keys(ids: Ids, rows: Rows, regime: int = BASE) -> list[bytes]:
    """Return a 16-byte digest of ``ids[: row + 1]`` for each of `rows`, which are in ascending order.

    In another `regime` the same tokens have other states, and so another digest.
    """
    h = hashlib.blake2b(digest_size=16, salt=regime.to_bytes(8, "little"))
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
        cut, between = stem if stem < n else n // 2, spare
    else:
        # A token that sees no earlier token of the pack begins a subtree: cut at the subtree nearest to the middle.
        begins = np.flatnonzero(np.concatenate([[n], np.maximum.accumulate(unit.ends)[:-1]]) <= np.arange(n))
        cut, between = int(begins[np.abs(begins - n // 2).argmin()]), NO_PREFIX
    halves: list[PackedBatch | PaddedBatch] = []
    for begin, stop, prefix, keep in (
        (0, cut, unit.prefix, between),
        (cut, n, between or unit.prefix, unit.keep),
    ):
        rows = unit.rows[(unit.rows >= begin) & (unit.rows < stop)] - begin
        ends = (np.minimum(unit.ends[begin:stop], stop) - begin).astype(np.int32)
        halves.append(PackedBatch(unit.ids[begin:stop], unit.positions[begin:stop], ends, rows, prefix, keep))
    return halves


@dataclass(slots=True)
class _Node:
    """A run of tokens below its parent: the tokens `start` .. `end` (exclusive) of sequence number `seq`."""

    start: int
    end: int
    seq: int
    parent: int
    children: list[int]

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class _Trie:
    """Distinct token sequences in lexicographic order, and the nodes of their trie."""

    sequences: list[Ids]  # Distinct and sorted, so that the order in which they were given has no effect
    nodes: list[_Node]  # _Node 0 is the root and has no tokens
    terminal: list[int]  # Per sequence, the node with which it ends

    def preorder(self, node: int) -> list[int]:
        """Return a node and all nodes below it, parents before children, children in token order."""
        order, stack = [], [node]
        while stack:
            order.append(stack.pop())
            stack.extend(reversed(self.nodes[order[-1]].children))
        return order

    def subtree_sizes(self) -> list[int]:
        """Return, per node, the number of tokens of it and of all nodes below it."""
        sizes = [node.length for node in self.nodes]
        for node in reversed(self.preorder(0)[1:]):
            sizes[self.nodes[node].parent] += sizes[node]
        return sizes


def sequence_key(ids: Ids) -> bytes:
    """Return bytes that sort as the token ids do (ids are not negative)."""
    return ids.astype(">i4").tobytes()


def build_trie(sequences: Sequence[Ids]) -> _Trie:
    """Return the compressed trie of sequences of one token or more, in any order, which may be repeated."""
    distinct = {sequence_key(ids): ids for ids in sequences}
    ordered = [distinct[key] for key in sorted(distinct)]
    nodes = [_Node(0, 0, 0, 0, [])]
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
            nodes.append(_Node(nodes[top].end, shared, nodes[last].seq, top, [last]))
            nodes[top].children[-1] = middle
            nodes[last].parent, nodes[last].start = middle, shared
            stack.append(middle)
            top = middle
        leaf = len(nodes)
        nodes.append(_Node(shared, len(ids), number, top, []))
        nodes[top].children.append(leaf)
        stack.append(leaf)
        terminal.append(leaf)
    return _Trie(ordered, nodes, terminal)


def _common_prefix(a: Ids, b: Ids) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


class _ScoredRows:
    """The scored positions of a trie, each as (node, depth), numbered in the order in which the units yield them."""

    def __init__(self, sequences: Sequence[Ids], n_scored: Sequence[int], regime: int = BASE) -> None:
        self._regime = regime  # of all sequences
        self.trie = build_trie(sequences)
        self._depths: dict[int, set[int]] = {}  # by node
        self._numbers: dict[tuple[int, int], int] = {}
        self._keys: list[bytes] = []
        numbers = {sequence_key(ids): n for n, ids in enumerate(self.trie.sequences)}
        places = cache(self._places)  # many requests have one context
        self._of_sequence = [
            places(numbers[sequence_key(ids)], count) for ids, count in zip(sequences, n_scored, strict=True)
        ]

    def _places(self, sequence: int, count: int) -> list[tuple[int, int]]:
        node, length = self.trie.terminal[sequence], len(self.trie.sequences[sequence])
        places = []
        for depth in range(length - 1, length - 1 - count, -1):
            while self.trie.nodes[node].start > depth:
                node = self.trie.nodes[node].parent
            places.append((node, depth))
            self._depths.setdefault(node, set()).add(depth)
        return places[::-1]

    def add(self, node: int) -> list[int]:
        """Number the scored positions of `node`, and return their depths; none if they have numbers already."""
        depths = sorted(self._depths.pop(node, ()))
        for depth in depths:
            self._numbers[node, depth] = len(self._numbers)
        sequence = self.trie.sequences[self.trie.nodes[node].seq]
        self._keys += prefix_keys(sequence, np.asarray(depths, dtype=np.int64), self._regime) if depths else []
        return depths

    def plan(self, units: Sequence[PackedBatch | PaddedBatch]) -> Plan:
        keys = np.frombuffer(b"".join(self._keys), dtype=np.uint8).reshape(-1, 16)
        rows = [np.asarray([self._numbers[p] for p in places], dtype=np.int64) for places in self._of_sequence]
        return Plan(units, keys, rows)


def plan_batches(
    sequences: Sequence[Ids], n_scored: Sequence[int], *, batch_tokens: int, regime: LengthRegime = one_regime
) -> Plan:
    """Return a plan of padded batches, the longest sequences first. A batch has sequences of one `regime`.

    A prefix of another sequence of its regime is not run again. `n_scored` counts the scored positions at the end of
    each sequence. `batch_tokens` is the most tokens per batch, padding included; a single longer sequence is a batch of
    its own.
    """
    members: dict[int, list[int]] = {BASE: []}
    for number, ids in enumerate(sequences):
        members.setdefault(regime(len(ids)), []).append(number)
    units: list[PackedBatch | PaddedBatch] = []
    keys: list[npt.NDArray[np.uint8]] = []
    rows: dict[int, Rows] = {}
    for key in sorted(members, reverse=True):
        scored = _ScoredRows([sequences[n] for n in members[key]], [n_scored[n] for n in members[key]], key)
        plan = scored.plan(_padded_batches(scored, batch_tokens))
        n_before = sum(map(len, keys))
        rows |= {n: n_before + own for n, own in zip(members[key], plan.sequence_rows, strict=True)}
        units += plan.units
        keys.append(plan.keys)
    return Plan(units, np.concatenate(keys), [rows[n] for n in range(len(sequences))])


def _padded_batches(scored: "_ScoredRows", batch_tokens: int) -> list[PaddedBatch]:
    trie = scored.trie
    ends = [(s, node) for s, node in enumerate(trie.terminal) if not trie.nodes[node].children]
    ends.sort(key=lambda end: (-len(trie.sequences[end[0]]), end[0]))
    units: list[PaddedBatch] = []
    while ends:
        n_rows = max(1, batch_tokens // len(trie.sequences[ends[0][0]]))
        taken, ends = ends[:n_rows], ends[n_rows:]
        rows = []
        for _, node in taken:
            path = []
            while node:
                path.append(node)
                node = trie.nodes[node].parent
            rows.append(np.asarray([d for n in reversed(path) for d in scored.add(n)], dtype=np.int64))
        units.append(PaddedBatch([trie.sequences[s] for s, _ in taken], rows))
    return units


def plan_packs(sequences: Sequence[Ids], n_scored: Sequence[int], *, batch_tokens: int, min_shared: int = 16) -> Plan:
    """Return a plan of packed batches in which every shared prefix is computed once.

    A subtree of the prefix trie that fits goes into one pack. For a larger subtree, the stem is computed on its own and
    cached, if it has at least `min_shared` tokens; a shorter stem is computed again in each pack.

    A single path longer than `batch_tokens` is a pack of its own.
    """
    packer = _Packer(_ScoredRows(sequences, n_scored), batch_tokens)
    nodes = packer.nodes
    # The trie is visited in preorder; the stack holds nodes to visit and prefixes to close.
    closing = -1
    stack: list[tuple[int, int, tuple[int, ...]]] = [(child, NO_PREFIX, ()) for child in reversed(nodes[0].children)]
    while stack:
        node, prefix, stem = stack.pop()
        if node == closing:
            packer.flush(prefix)
            continue
        stem_size = sum(nodes[n].length for n in stem)
        if not nodes[node].children or packer.sizes[node] + stem_size <= batch_tokens:
            packer.gather(node, prefix, stem)
            continue
        stem = (*stem, node)
        if stem_size + nodes[node].length >= min_shared:
            prefix, stem = packer.cache(stem, prefix), ()
            stack.append((closing, prefix, ()))
        stack.extend((child, prefix, stem) for child in reversed(nodes[node].children))
    packer.flush(NO_PREFIX)
    return packer.scored.plan(packer.units)


class _Packer:
    """Collects nodes behind each prefix in use, and makes packs of them."""

    def __init__(self, scored: _ScoredRows, limit: int) -> None:
        self.scored, self.nodes, self.sizes = scored, scored.trie.nodes, scored.trie.subtree_sizes()
        self.units: list[PackedBatch] = []
        self._limit = limit
        self._n_prefixes = 0
        self._open: dict[int, dict[int, None]] = {NO_PREFIX: {}}  # by prefix, the nodes of its next pack in preorder
        self._filled = {NO_PREFIX: 0}  # by prefix, the tokens of these nodes

    def gather(self, node: int, prefix: int, stem: tuple[int, ...]) -> None:
        """Add a subtree behind its stem to the next pack of a prefix, or to a new one where it does not fit."""
        nodes = self._open[prefix]
        new = self.sizes[node] + sum(self.nodes[n].length for n in stem if n not in nodes)
        if nodes and self._filled[prefix] + new > self._limit:
            self.flush(prefix)
            new = self.sizes[node] + sum(self.nodes[n].length for n in stem)
        self._filled[prefix] += new
        self._open[prefix].update(dict.fromkeys((*stem, *self.scored.trie.preorder(node))))

    def cache(self, path: tuple[int, ...], prefix: int) -> int:
        """Make a pack whose keys and values are kept, and return the number of this new prefix."""
        self._n_prefixes += 1
        self._open[self._n_prefixes], self._filled[self._n_prefixes] = {}, 0
        self._pack(list(path), prefix, self._n_prefixes)
        return self._n_prefixes

    def flush(self, prefix: int) -> None:
        """Make a pack of what was collected behind a prefix."""
        if self._open[prefix]:
            self._pack(list(self._open[prefix]), prefix, NO_PREFIX)
        self._open[prefix], self._filled[prefix] = {}, 0

    def _pack(self, numbers: list[int], prefix: int, keep: int) -> None:
        nodes = [self.nodes[number] for number in numbers]
        lengths = [node.length for node in nodes]
        ends = dict(zip(numbers, np.cumsum(lengths).tolist(), strict=True))
        # A position is as far before the node's end in the pack as it is in the sequence.
        rows = [ends[n] - self.nodes[n].end + depth for n in numbers for depth in self.scored.add(n)]
        for number, node in zip(reversed(numbers), reversed(nodes), strict=True):
            if node.parent in ends:
                ends[node.parent] = max(ends[node.parent], ends[number])
        pack = PackedBatch(
            ids=np.concatenate([self.scored.trie.sequences[node.seq][node.start : node.end] for node in nodes]),
            positions=np.concatenate([np.arange(node.start, node.end, dtype=np.int32) for node in nodes]),
            ends=np.repeat(np.asarray(list(ends.values()), dtype=np.int32), lengths),
            rows=np.asarray(rows, dtype=np.int64),
            prefix=prefix,
            keep=keep,
        )
        self.units.append(pack)
