"""A compressed trie of token sequences: a prefix that several prompts share appears once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


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
    """Distinct token sequences in lexicographic order, and the nodes of their trie.

    Attributes
    ----------
    sequences : list of ndarray of int32
        Distinct and sorted, so that the order in which they were given has no effect.
    nodes : list of Node
        Node 0 is the root and has no tokens.
    terminal : list of int
        Per sequence, the node with which it ends.
    """

    sequences: list[Ids]
    nodes: list[Node]
    terminal: list[int]

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

    Parameters
    ----------
    sequences : sequence of ndarray of int32, each shape (n,), n >= 1
        In any order, repetitions allowed.
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
