"""Finished answers of an interrupted generation on disk, so that no answer is generated twice."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mlflow_compress.scoring.checkpointing.journal import Arrays, Journal
from mlflow_compress.scoring.generation.generation_rows import GenerationRow
from mlflow_compress.scoring.generation.sampling import GenerationConfig

logger = logging.getLogger(__name__)


class CheckpointedModel(Protocol):
    """Interface of a model, as far as its answers depend on it."""

    @property
    def weights(self) -> str:
        """Hash of its weights."""

    @property
    def dtype(self) -> Any:
        """torch.dtype of its weights."""


class GenerationCheckpoint:
    """Restores the rows that an earlier run has finished, and saves the rows that this run finishes.

    Parameters
    ----------
    folder : Path
        Used by this generation only. Delete it when the answers are saved.
    loaded, rows, config, until, end_tokens
        What the answers depend on, as in `decoding.decode`.
    seconds : float
        How often finished rows are saved. Rows that are not yet saved are lost when the process is killed.

    Raises
    ------
    StoreError
        When the folder belongs to another generation, or is damaged.
    """

    def __init__(
        self,
        folder: Path,
        loaded: CheckpointedModel,
        rows: Sequence[GenerationRow],
        config: GenerationConfig,
        *,
        until: Sequence[str],
        end_tokens: Collection[int],
        seconds: float = 60.0,
    ) -> None:
        identity = {
            "weights": loaded.weights,
            "dtype": str(loaded.dtype),
            "prompts": _digest(rows),
            "settings": json.dumps(asdict(config)),
            "ends": json.dumps([list(until), sorted(end_tokens)]),
        }
        self._rows = rows
        self._journal = Journal(folder, identity)
        self._seconds = seconds
        for _, arrays, _ in self._journal.load():
            _fill(rows, arrays)
        self._unwritten = [number for number, row in enumerate(rows) if not row.done]
        self._written = time.monotonic()
        if n_done := len(rows) - len(self._unwritten):
            logger.info("%d of %d answers were already finished", n_done, len(rows))

    def write(self, *, now: bool = False) -> None:
        """Save the rows finished since the last call, if `seconds` have passed since then, or if `now`."""
        if not now and time.monotonic() - self._written < self._seconds:
            return
        fresh = [number for number in self._unwritten if self._rows[number].done]
        if fresh:
            self._unwritten = [number for number in self._unwritten if not self._rows[number].done]
            self._journal.append(len(self._rows) - len(self._unwritten), _arrays(self._rows, fresh), {})
        self._written = time.monotonic()


def _digest(rows: Sequence[GenerationRow]) -> str:
    total = hashlib.sha256()
    for row in rows:
        total.update(f"{row.prompt} {row.temperature} ".encode())
        total.update(row.u.tobytes())
    return total.hexdigest()


def _arrays(rows: Sequence[GenerationRow], numbers: Sequence[int]) -> Arrays:
    texts = [rows[number].text.encode() for number in numbers]
    return {
        "row": np.asarray(numbers, dtype=np.int64),
        "n_tokens": np.asarray([len(rows[number].tokens) for number in numbers], dtype=np.int64),
        "tokens": np.asarray([token for number in numbers for token in rows[number].tokens], dtype=np.int64),
        "n_ends": np.asarray([len(rows[number].end) for number in numbers], dtype=np.int64),
        "ends": np.asarray([token for number in numbers for token in rows[number].end], dtype=np.int64),
        "n_bytes": np.asarray([len(text) for text in texts], dtype=np.int64),
        "text": np.frombuffer(b"".join(texts), dtype=np.uint8),
    }


def _fill(rows: Sequence[GenerationRow], arrays: Arrays) -> None:
    tokens, ends, texts = (
        np.split(arrays[values], np.cumsum(arrays[counts])[:-1])
        for values, counts in (("tokens", "n_tokens"), ("ends", "n_ends"), ("text", "n_bytes"))
    )
    for number, its_tokens, end, text in zip(arrays["row"].tolist(), tokens, ends, texts, strict=True):
        row = rows[number]
        row.tokens, row.end, row.text = its_tokens.tolist(), end.tolist(), text.tobytes().decode()
        row.done = True
