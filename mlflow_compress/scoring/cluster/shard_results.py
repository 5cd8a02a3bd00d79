"""Results of a shard on their way from a worker: Arrow tables, and back to what the journal and the store keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from mlflow_compress.scoring.baseline_store.sent_states import as_bytes, from_bytes
from mlflow_compress.scoring.baseline_store.state_writer import CapturedRows
from mlflow_compress.scoring.checkpointing.journal import Arrays

_OF_TARGETS = "logprob"  # the only result with one value per target; all others have one per row


@dataclass(frozen=True)
class ShardResult:
    """Result of a shard.

    Attributes
    ----------
    targets : pyarrow.Table
        One row per target.
    rows : pyarrow.Table
        One row per scored position.
    states : pyarrow.Table or None
        The states to store: bytes of the row, key and target of each scored position.
    n_splits : int
        How often memory ran out.
    """

    targets: pa.Table
    rows: pa.Table
    states: pa.Table | None
    n_splits: int

    @classmethod
    def of(cls, arrays: Arrays, captured: Sequence[CapturedRows], n_splits: int) -> ShardResult:
        """Return the tables of a shard's arrays, and of the rows that were captured, if any."""
        targets = pa.table({_OF_TARGETS: arrays[_OF_TARGETS]})
        rows = pa.table({name: values for name, values in arrays.items() if name != _OF_TARGETS})
        return cls(targets, rows, _states_table(captured) if captured else None, n_splits)

    def arrays(self) -> Arrays:
        """Return the arrays, as `ScoringPass` makes them."""
        return {
            name: table.column(name).combine_chunks().to_numpy(zero_copy_only=False)
            for table in (self.targets, self.rows)
            for name in table.column_names
        }

    def captured(self, row: int) -> CapturedRows | None:
        """Return the rows to store; `row` is the number of the first one in the whole pass."""
        if self.states is None:
            return None
        said = {name.decode(): text.decode() for name, text in self.states.schema.metadata.items()}
        raw, keys = (_byte_rows(self.states.column(name)) for name in ("row", "key"))
        targets = np.array(self.states.column("target").combine_chunks())
        rows = from_bytes(raw, said["dtype"], (len(raw), -1))
        return CapturedRows(row, rows, keys, targets, said["kind"], said.get("reason"))


def _states_table(captured: Sequence[CapturedRows]) -> pa.Table:
    rows = torch.cat([part.rows for part in captured])
    first = captured[0]
    said = {"kind": first.kind, "dtype": str(rows.dtype).removeprefix("torch.")}
    if first.reason is not None:
        said["reason"] = first.reason
    columns = {
        "row": _fixed(as_bytes(rows)),
        "key": _fixed(np.concatenate([part.keys for part in captured])),
        "target": pa.array(np.concatenate([part.targets for part in captured])),
    }
    return pa.table(columns).replace_schema_metadata(said)


def _fixed(raw: npt.NDArray[np.uint8]) -> pa.Array:
    """Return one value of fixed width per row of bytes."""
    n, width = raw.shape
    return pa.Array.from_buffers(pa.binary(width), n, [None, pa.py_buffer(np.ascontiguousarray(raw))])


def _byte_rows(column: pa.ChunkedArray) -> npt.NDArray[np.uint8]:
    array = column.combine_chunks()
    width = array.type.byte_width
    raw = np.frombuffer(array.buffers()[1], dtype=np.uint8)
    return raw[array.offset * width : (array.offset + len(array)) * width].reshape(len(array), width)
