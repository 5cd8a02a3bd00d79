"""The baseline's most probable tokens at scored positions: of its stored states, or as its server has shown them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from mlflow_compress.engines.endpoint.routes import TopList
from mlflow_compress.errors import AlignmentError, StoreError
from mlflow_compress.scoring.baseline_store import Keys, StateStore

FILE = "top_lists.parquet"
NO_LIST: TopList = np.zeros(0, np.int64), np.zeros(0)
"""Of a position that was asked without a list."""
_ROWS = 256  # whose logits are in memory at once


class TopLists(Protocol):
    """Interface of a baseline's lists."""

    @property
    def most(self) -> int:
        """Length of the longest list."""

    def lists(self, keys: Keys, k: int) -> Sequence[TopList | None]:
        """Return the k most probable tokens at each position, fewer where there are fewer; None without a list."""


class StoredStates:
    """Lists of a baseline whose states are stored: from its whole distribution."""

    def __init__(self, store: StateStore) -> None:
        self._store = store

    @property
    def most(self) -> int:
        """The whole vocabulary."""
        return self._store.manifest.vocab_size

    def lists(self, keys: Keys, k: int) -> list[TopList]:
        """Return the k most probable tokens at each position."""
        rows, found = self._store.rows_of(keys), list[TopList]()
        for start in range(0, len(rows), _ROWS):
            logits = self._store.logits(rows[start : start + _ROWS], torch.device("cpu"))
            values, ids = torch.log_softmax(logits.float(), dim=-1).topk(k, dim=-1)
            found += list(zip(ids.numpy(), values.double().numpy(), strict=True))
        return found


class ShownLists:
    """Lists that a server has shown, in a folder."""

    def __init__(self, folder: Path) -> None:
        try:
            table = pq.read_table(folder / FILE)
            self._row = {key: row for row, key in enumerate(table.column("key").to_pylist())}
            self._ids, self._logprobs = (table.column(name).to_pylist() for name in ("ids", "logprobs"))
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            raise StoreError(
                f"The baseline's top lists cannot be read: {error}", fix="Evaluate the baseline again"
            ) from error

    @property
    def most(self) -> int:
        """Length of the longest list."""
        return max(map(len, self._ids), default=0)

    def lists(self, keys: Keys, k: int) -> list[TopList | None]:
        """Return the k most probable tokens at each position, fewer where the server has shown fewer.

        None where it was asked without a list.
        """
        names = [key.tobytes() for key in keys]
        missing = sum(name not in self._row for name in names)
        if missing:
            raise AlignmentError(
                f"The baseline was not asked at {missing} of the {len(names)} scored positions",
                fix="Evaluate baseline and variant on the same tasks, limit and seed, with the same tokenizer",
            )
        rows = [self._row[name] for name in names]
        return [
            (np.asarray(self._ids[r][:k], np.int64), np.asarray(self._logprobs[r][:k], np.float64))
            if self._ids[r]
            else None
            for r in rows
        ]


class ListWriter:
    """Stores the lists that a server shows in one pass over requests; a context manager, as `StateWriter` is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: `write` has written all."""

    def write(self, lists: Mapping[bytes, TopList]) -> None:
        """Write the lists of the pass, by the key of their position."""
        self._folder.mkdir(parents=True, exist_ok=True)
        columns = {
            "key": pa.array(lists, pa.binary(16)),
            "ids": pa.array([ids.tolist() for ids, _ in lists.values()], pa.list_(pa.int64())),
            "logprobs": pa.array([values.tolist() for _, values in lists.values()], pa.list_(pa.float64())),
        }
        pq.write_table(pa.table(columns), self._folder / FILE)
