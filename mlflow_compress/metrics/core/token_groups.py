"""Joins the token records of two runs without a Python object per token."""

import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics.stats.arrays import Float, Int, Objects
from mlflow_compress.metrics.stats.intervals import FEWEST_GROUPS
from mlflow_compress.records import TokenDistances, TokenScores, align


@dataclass(frozen=True)
class _TokenGroups:
    """Which corpus and which window each token belongs to."""

    tasks: Objects  # Corpora; shape (n_tasks,)
    # Codes of the corpus, the window, and the document that the window is from (unique over all corpora); shape
    # (n_tokens,)
    task: Int
    window: Int
    document: Int


def _codes(column: pa.ChunkedArray) -> tuple[Objects, Int]:
    encoded = column.combine_chunks().dictionary_encode()
    names = np.asarray(encoded.dictionary.to_numpy(zero_copy_only=False))
    return names, np.asarray(encoded.indices.to_numpy(zero_copy_only=False), dtype=np.int64)


def token_groups(scores: TokenScores) -> _TokenGroups:
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
    there = np.bincount(window, minlength=len(tasks) * len(windows)).reshape(len(tasks), -1) > 0
    document = np.zeros(there.shape, dtype=np.int64)
    for number, used in enumerate(there):
        codes = np.unique(documents_of(windows[used].astype(str)), return_inverse=True)[1]
        document[number, used] = number * len(windows) + codes
    return _TokenGroups(tasks, task, window, document.ravel()[window])


_FEWEST_WINDOWS = 5000
"""Windows of a text with unknown documents from which on stretches of it count as groups, at least 250 windows each.

A stretch must hold several documents, and how long these are no sample says for sure: where stretches were chosen by
the correlation that is seen (Politis and White, "Automatic block-length selection for the dependent bootstrap", 2004),
the intervals that were given held the truth in 30 to 83 % (`benchmarks/README.md`), because one is given where the
correlation happens not to be seen. So the limit is one for documents of up to 200 windows
(`benchmarks/interval_edges.py`).
"""


def documents_of(windows: Objects) -> Int:
    """Return the number of the document of each window of one corpus, from the windows' names.

    "7.41" is a window of document 7 (or the document in which it begins), "q3/0" an answer to the prompt "q3", and "41"
    a window of a text whose documents are not known. That text is one document; where it is long its windows are cut
    into `FEWEST_GROUPS` stretches, so that what neighbours share is within a stretch (batch means).

    Source: Flegal and Jones, "Batch means and spectral variance estimators in Markov chain Monte Carlo", Annals of
    Statistics 2010.
    """
    if all(re.fullmatch(r"\d+", name) for name in windows):
        if len(windows) < _FEWEST_WINDOWS:
            return np.zeros(len(windows), dtype=np.int64)
        rank = np.argsort(np.argsort(windows.astype(np.int64)))
        return np.asarray(rank * FEWEST_GROUPS // len(windows), dtype=np.int64)
    if all(re.fullmatch(r"\d+\.\d+", name) for name in windows):
        return np.array([int(name.partition(".")[0]) for name in windows], dtype=np.int64)
    names = [name.rpartition("/")[0] or name for name in windows]
    return np.asarray(np.unique(names, return_inverse=True)[1], dtype=np.int64)


def matched(ours: TokenScores, theirs: TokenScores | TokenDistances, column: str) -> Float:
    """Return one column of `theirs` in the row order of `ours`; other tokens are an `AlignmentError`."""
    same = len(ours) == len(theirs) and all(
        pc.all(pc.equal(ours.table.column(k), theirs.table.column(k))).as_py() for k in TokenScores.KEY
    )
    order = None if same else align(ours, theirs)  # in the same order no index of ten million rows is needed
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
