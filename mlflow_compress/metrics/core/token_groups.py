"""Joins the token records of two runs without a Python object per token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics.stats.arrays import Float, Int, Objects
from mlflow_compress.records import TokenDistances, TokenScores, align


@dataclass(frozen=True)
class TokenGroups:
    """Which corpus and which window each token belongs to."""

    tasks: Objects  # Corpora; shape (n_tasks,)
    task: Int  # Code of the corpus, and of the window (unique over all corpora); shape (n_tokens,)
    window: Int


def _codes(column: pa.ChunkedArray) -> tuple[Objects, Int]:
    encoded = column.combine_chunks().dictionary_encode()
    names = np.asarray(encoded.dictionary.to_numpy(zero_copy_only=False))
    return names, np.asarray(encoded.indices.to_numpy(zero_copy_only=False), dtype=np.int64)


def token_groups(scores: TokenScores) -> TokenGroups:
    """Return corpus and window codes of token records; repeated (task, window, position) keys are refused."""
    if len(scores) == 0:
        raise DataError("The token_scores records are empty")
    tasks, task = _codes(scores.table.column("task"))
    windows, window = _codes(scores.table.column("item_id"))
    window = task * len(windows) + window
    position = scores.column("position").astype(np.int64)
    cell = window * (int(position.max()) + 1) + position
    # Records in reading order increase; only others need the sort.
    if not (np.diff(cell) > 0).all() and len(np.unique(cell)) != len(cell):
        raise AlignmentError("Duplicate keys in the token_scores records", fix="Every key must be unique")
    return TokenGroups(tasks, task, window)


def _matching(ours: TokenScores, theirs: TokenScores | TokenDistances) -> Int | None:
    same = len(ours) == len(theirs) and all(
        pc.all(pc.equal(ours.table.column(k), theirs.table.column(k))).as_py() for k in TokenScores.KEY
    )
    # `None` means "already in this order": no index of ten million rows is needed then.
    return None if same else align(ours, theirs)


def matched(ours: TokenScores, theirs: TokenScores | TokenDistances, column: str) -> Float:
    """Return one column of `theirs` in the row order of `ours`, as float64.

    Raises `AlignmentError`: when the two do not hold the same tokens.
    """
    order = _matching(ours, theirs)
    values = theirs.column(column).astype(np.float64, copy=False)
    return np.asarray(values if order is None else values[order], dtype=np.float64)


def check_same_targets(ours: TokenScores, theirs: TokenScores) -> None:
    """Refuse token records whose target tokens differ: other tokenizers or other text."""
    a, b = ours.column("target"), matched(ours, theirs, "target").astype(np.int64)
    differing = np.flatnonzero(a != b)
    if len(differing):
        row = ours.table.slice(int(differing[0]), 1).to_pylist()[0]
        raise AlignmentError(
            f"Baseline and variant scored different target tokens at {len(differing)} positions",
            got=f"{row['task']}/{row['item_id']} position {row['position']}",
            fix="Use the same tokenizer and corpus for both",
        )
