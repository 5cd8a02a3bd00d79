"""Makes records from the results of a pass: one row per request, or one row per corpus token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mlflow_compress.records import OptionDistances, OptionScores, Request, TokenDistances, TokenScores
from mlflow_compress.scoring.checkpointing.journal import Arrays
from mlflow_compress.scoring.plan.corpus_windows import Windows
from mlflow_compress.scoring.plan.encoding import Encoded
from mlflow_compress.scoring.scoring_pass import DISTANCES, Targets


def option_scores(
    requests: Sequence[Request],
    encoded: Sequence[Encoded],
    targets: Targets,
    place: npt.NDArray[np.int64],
    result: Arrays,
) -> OptionScores:
    """Return one row per request: its targets' summed log-probability, and whether all are the most probable token.

    `place` holds the indices of the targets, request by request. The results of a served model say themselves, in
    `is_argmax`, which targets are the most probable token. Of them alone NaN is a missing log-probability.
    """
    elsewhere = "is_argmax" in result
    logprob = result["logprob"][place]
    is_argmax = (
        result["is_argmax"][place] if elsewhere else result["argmax"][targets.row[place]] == targets.token[place]
    )
    starts = _starts(encoded)
    fits = np.asarray([e.fits for e in encoded], dtype=bool)
    loglik: list[float | None] = [None] * len(requests)
    greedy: list[bool | None] = [None] * len(requests)
    if len(starts):
        sums, hits = np.add.reduceat(logprob, starts), np.logical_and.reduceat(is_argmax, starts)
        for i, total, every in zip(np.flatnonzero(fits).tolist(), sums.tolist(), hits.tolist(), strict=True):
            if not (elsewhere and np.isnan(total)):
                loglik[i], greedy[i] = total, every
    return OptionScores.from_columns(
        {
            **_keys(requests),
            "content": [r.content for r in requests],
            "loglik": loglik,
            "n_tokens": [len(e.targets) for e in encoded],
            "n_chars": [r.n_chars for r in requests],
            "n_bytes": [r.n_bytes for r in requests],
            "greedy": greedy,
        }
    )


def option_distances(
    requests: Sequence[Request],
    encoded: Sequence[Encoded],
    targets: Targets,
    place: npt.NDArray[np.int64],
    result: Arrays,
) -> OptionDistances | None:
    """Return one row per request: the distances, averaged over its tokens. None without a baseline."""
    if "kl" not in result:
        return None
    rows, starts = targets.row[place], _starts(encoded)
    counts = np.diff([*starts, len(rows)])
    columns: dict[str, Any] = dict(_keys(requests))
    for kind in DISTANCES:
        values = result[kind].astype(np.float64)[rows]
        means = iter((np.add.reduceat(values, starts) / counts).tolist() if len(starts) else ())
        columns[kind] = [next(means) if e.fits else None for e in encoded]
    return OptionDistances.from_columns(columns)


def token_scores(task: str, windows: Windows, result: Arrays) -> TokenScores:
    """Return one row per scored corpus token, window by window."""
    return TokenScores.from_columns(
        {
            **_token_keys(task, windows),
            "target": windows.targets,
            "nll": -result["logprob"],
            "p_target": np.exp(result["logprob"]),
            "argmax": result["argmax"],
            "entropy": result.get("entropy", [None] * len(windows.targets)),
        }
    )


def token_distances(task: str, windows: Windows, result: Arrays) -> TokenDistances | None:
    """Return the distances of each scored corpus token; None without a baseline."""
    if "kl" not in result:
        return None
    return TokenDistances.from_columns({**_token_keys(task, windows), **{k: result[k] for k in DISTANCES}})


def _keys(requests: Sequence[Request]) -> dict[str, list[Any]]:
    names = ("task", "item_id", "permutation", "option")
    return {name: [getattr(r, name) for r in requests] for name in names}


def _token_keys(task: str, windows: Windows) -> dict[str, Any]:
    counts = [len(p) for p in windows.scored]
    return {
        "task": [task] * sum(counts),
        "item_id": np.repeat(windows.names or np.arange(len(counts)).astype(str), counts),
        "position": np.concatenate(windows.scored),
    }


def _starts(encoded: Sequence[Encoded]) -> npt.NDArray[np.int64]:
    """Return the index of the first target of each request that fits into the context."""
    lengths = [len(e.targets) for e in encoded if e.fits]
    return np.cumsum([0, *lengths[:-1]]) if lengths else np.zeros(0, np.int64)
