"""What a served model is asked, and what it has answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mlflow_compress.scoring.plan.trie import Ids, sequence_key

TopList = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
"""The most probable next tokens and their log-probabilities, the most probable first."""


@dataclass(frozen=True, eq=False)
class TokenQuestion:
    """Tokens that the server reads, and which log-probabilities are wanted.

    Attributes
    ----------
    tokens : ndarray of int32
    scored : int
        Wanted are those of so many of the last tokens (an echo of the prompt); 0: of the token that comes next.
    forced : int or None
        Where the next token is wanted: a token that the server is made to write, so that it says its log-probability.
        None: the most probable one.
    """

    tokens: Ids
    scored: int = 0
    forced: int | None = None

    @property
    def order(self) -> bytes:
        """Sorts questions so that prompts with a common beginning follow each other, as prefix caches like it."""
        return sequence_key(self.tokens)

    @property
    def content(self) -> dict[str, Any]:
        """Everything that decides the answer of one server."""
        return {"tokens": self.tokens.tolist(), "scored": self.scored, "forced": self.forced}


@dataclass(frozen=True, eq=False)
class Position:
    """The next-token distribution after some tokens, as far as the server has shown it.

    Attributes
    ----------
    logprob : float or None
        Log-probability of the token that follows; None where the server has not said it.
    top : TopList
    """

    logprob: float | None
    top: TopList

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"logprob": self.logprob, "ids": self.top[0].tolist(), "logprobs": self.top[1].tolist()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Position:
        """Return what `to_json` has turned into plain values."""
        return cls(row["logprob"], (np.asarray(row["ids"], np.int64), np.asarray(row["logprobs"], np.float64)))


def top_list(logprobs: Mapping[int, float], most: int) -> TopList:
    """Return the `most` highest log-probabilities; of equal ones those of the lower token ids."""
    best = sorted(logprobs.items(), key=lambda pair: (-pair[1], pair[0]))[:most]
    return np.asarray([i for i, _ in best], np.int64), np.asarray([v for _, v in best], np.float64)


@dataclass(frozen=True, eq=False)
class Wanted:
    """Scored positions: the row of each, the tokens that lead to it, and the tokens whose log-probability is wanted.

    Attributes
    ----------
    prefix : mapping of int to ndarray
        By row.
    tokens : mapping of int to list of int
        By row.
    whole : list of TokenQuestion
        Echoes that answer many rows at once, with the row of each scored position in `rows`.
    rows : list of ndarray
        Rows of each of `whole`.
    """

    prefix: Mapping[int, Ids]
    tokens: Mapping[int, Sequence[int]]
    whole: Sequence[TokenQuestion]
    rows: Sequence[npt.NDArray[np.int64]]


def wanted(
    inputs: Sequence[Ids], targets: Sequence[Ids], rows: Sequence[npt.NDArray[np.int64]], *, echo: bool, steps: bool
) -> Wanted:
    """Return what has to be asked.

    Options of one token share their prompt: one question for the token that comes next shows most of them, and the
    server's prefix cache serves it. A longer continuation is one echo. Without `echo` every position is a question.

    Parameters
    ----------
    inputs, targets : sequence of ndarray
        Per sequence, the tokens that are read, and the last `len(targets)` tokens that are predicted.
    rows : sequence of ndarray
        Per sequence, the row of each predicted token.
    echo : bool
        Whether the server gives the log-probabilities of a prompt's own tokens.
    steps : bool
        Whether a single token is asked for by the list of the token that comes next.
    """
    prefix: dict[int, Ids] = {}
    tokens: dict[int, list[int]] = {}
    whole: list[TokenQuestion] = []
    whole_rows: list[npt.NDArray[np.int64]] = []
    for read, predicted, places in zip(inputs, targets, rows, strict=True):
        if echo and not (steps and len(predicted) == 1):
            whole.append(TokenQuestion(np.append(read, predicted[-1]).astype(np.int32), scored=len(predicted)))
            whole_rows.append(places)
            continue
        start = len(read) - len(predicted) + 1
        for offset, (row, token) in enumerate(zip(places.tolist(), predicted.tolist(), strict=True)):
            prefix[row] = read[: start + offset]
            if token not in tokens.setdefault(row, []):
                tokens[row].append(token)
    return Wanted(prefix, tokens, whole, whole_rows)
