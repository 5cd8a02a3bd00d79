"""The vectors of answers, with the encoder that gave them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mlflow_compress.errors import DataError
from mlflow_compress.records.table import Records


class Embeddings(Records):
    """One vector per sampled answer of one model.

    `encoder` is the encoder's name, and `encoder_id` the digest of everything that decides its vectors: vectors are
    compared only where it is the same.
    """

    NAME = "embeddings"
    KEY = ("task", "item_id", "sample")
    SCHEMA = pa.schema(
        [
            pa.field("task", pa.string()),
            pa.field("item_id", pa.string()),
            pa.field("sample", pa.int16()),
            pa.field("encoder", pa.string()),
            pa.field("encoder_id", pa.string()),
            pa.field("vector", pa.list_(pa.float32())),
        ]
    )

    @classmethod
    def from_array(
        cls, task: str, item_ids: Sequence[str], vectors: npt.NDArray[np.float32], *, encoder: str, encoder_id: str
    ) -> Embeddings:
        """Return the records of an array of shape (n, k, d): k samples of each of n instructions."""
        n, k, d = vectors.shape
        flat = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1))
        columns = {
            "task": [task] * (n * k),
            "item_id": [item for item in item_ids for _ in range(k)],
            "sample": list(range(k)) * n,
            "encoder": [encoder] * (n * k),
            "encoder_id": [encoder_id] * (n * k),
            "vector": pa.ListArray.from_arrays(np.arange(0, n * k * d + 1, d, dtype=np.int32), flat),
        }
        return cls.from_columns(columns)

    def by_instruction(self) -> tuple[tuple[str, ...], npt.NDArray[np.float32]]:
        """Return the instructions in the order of their ids, and their vectors, shape (n, k, d).

        Raises `DataError`: an instruction lacks a sample, or vectors have different lengths.
        """
        keys = self.key_rows()
        order = sorted(range(len(keys)), key=keys.__getitem__)
        items = tuple(dict.fromkeys(keys[row][1] for row in order))
        values = [self.table.column("vector")[row].as_py() for row in order]
        lengths = {len(vector or ()) for vector in values}
        k = len(order) // max(len(items), 1)
        if len(lengths) != 1 or len(items) * k != len(order) or len(set(keys)) != len(keys):
            raise DataError(
                "These embeddings are not complete", got=f"{len(order)} vectors of {len(items)} instructions"
            )
        vectors = np.array(values, dtype=np.float32).reshape(len(items), k, -1)
        return items, vectors
