"""A columnar table with a fixed schema and a unique key, and the join of two of them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mlflow_compress import files as atomic
from mlflow_compress.errors import AlignmentError, DataError

_ROWS = b"mlflow_compress.rows"  # metadata of a stored table: how many rows were written


@dataclass(frozen=True)
class Records:
    """A table with a fixed schema and a unique key; every subclass defines both."""

    table: pa.Table  # Columns exactly as in `SCHEMA` (order included), no nulls where the schema forbids them

    NAME: ClassVar[str]  # The class's name in small letters: "option_scores" of `OptionScores`
    SCHEMA: ClassVar[pa.Schema]
    KEY: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        cls.NAME = re.sub("(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()

    def __post_init__(self) -> None:
        if self.table.schema.names != self.SCHEMA.names:
            raise DataError(
                f"{self.NAME} records have the wrong columns", allowed=self.SCHEMA.names, got=self.table.schema.names
            )

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> Self:
        """Build records from one array or list per column, cast to the schema."""
        missing = [name for name in cls.SCHEMA.names if name not in columns]
        if missing:
            raise DataError(f"{cls.NAME} records lack columns", got=missing)
        arrays = [pa.array(columns[f.name], type=f.type) for f in cls.SCHEMA]
        return cls(pa.Table.from_arrays(arrays, schema=cls.SCHEMA))

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]]) -> Self:
        return cls(pa.Table.from_pylist(list(rows), schema=cls.SCHEMA))

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        if not parts:
            return cls(cls.SCHEMA.empty_table())
        return cls(pa.concat_tables([p.table for p in parts]).combine_chunks())

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """Return one column as a numpy array (object dtype for strings and lists; floats with NaN for nulls)."""
        return np.asarray(self.table.column(name).to_numpy(zero_copy_only=False))

    def key_rows(self) -> list[tuple[Any, ...]]:
        """Return the key of every row, as tuples in row order."""
        return list(zip(*(self.table.column(k).to_pylist() for k in self.KEY), strict=True))

    def where(self, **equal: Any) -> Self:
        """Return the rows whose columns equal the given values (a list, tuple or set means any of them)."""
        return type(self)(self.table.filter(pa.array(self._mask(equal))))

    def without(self, **equal: Any) -> Self:
        """Return the rows that `where` would leave out."""
        return type(self)(self.table.filter(pa.array(~self._mask(equal))))

    def _mask(self, equal: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        mask = np.ones(len(self), dtype=bool)
        for name, wanted in equal.items():
            values = self.column(name)
            if isinstance(wanted, list | tuple | set | frozenset):
                mask &= np.isin(values, list(wanted))
            else:
                mask &= values == wanted
        return mask

    def write(self, folder: Path) -> Path:
        """Write `<folder>/<NAME>.parquet` atomically and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.NAME}.parquet"
        with atomic.writing(path) as sink:
            # The number of rows stays with a table that is cut by a tool, and a checksum tells a changed page.
            told = self.table.replace_schema_metadata({_ROWS: str(len(self))})
            pq.write_table(told, sink, compression="zstd", write_page_checksum=True)
        return path

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read what `write` wrote, or another program's table of the same columns.

        Raises `DataError`: the file is missing, unreadable or changed; it has other columns, or values of another type;
        or it has not the rows that were written.
        """
        path = folder / f"{cls.NAME}.parquet"
        if not path.is_file():
            raise DataError(f"No {cls.NAME} records", got=str(path), fix="Run the evaluate stage again")
        try:
            table = pq.ParquetFile(path, page_checksum_verification=True).read()
            table.validate(full=True)
        except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError) as error:
            raise DataError(f"The {cls.NAME} records cannot be read: {error}", got=str(path)) from error
        if table.schema.names != cls.SCHEMA.names:
            raise DataError(f"{cls.NAME} records have the wrong columns", allowed=cls.SCHEMA.names, got=str(path))
        written = (table.schema.metadata or {}).get(_ROWS)
        if written is not None and written != str(table.num_rows).encode():
            allowed = f"{written.decode(errors='replace')} rows"
            raise DataError(f"The {cls.NAME} records are not whole", allowed=allowed, got=table.num_rows)
        try:
            typed = table.cast(cls.SCHEMA)
        except pa.ArrowException as error:
            raise DataError(f"The {cls.NAME} records have a column of another type: {error}", got=str(path)) from error
        missing = [name for name in cls.KEY if typed.column(name).null_count]
        if missing:
            raise DataError(f"The {cls.NAME} records have rows without {missing[0]}", got=str(path))
        return cls(typed)


def align(baseline: Records, variant: Records) -> np.ndarray[Any, Any]:
    """Return, for every row of `baseline`, the row of `variant` that has the same key.

    `variant.table.take(result)` has the order of `baseline`.

    Raises `AlignmentError` when a key is repeated, or when the two sets of keys differ; the first missing ids are
    named.
    """
    keys_b, keys_q = baseline.key_rows(), variant.key_rows()
    index = {key: row for row, key in enumerate(keys_q)}
    if len(index) != len(keys_q) or len(set(keys_b)) != len(keys_b):
        raise AlignmentError(
            f"Duplicate keys in the {variant.NAME} records", fix="Every item id must be unique in its task"
        )
    missing = [key for key in keys_b if key not in index]
    extra = sorted(set(index) - set(keys_b)) if len(keys_q) != len(keys_b) - len(missing) else []
    if missing or extra:
        raise AlignmentError(
            f"The {variant.NAME} records of baseline and variant hold different items: "
            f"{len(missing)} only in the baseline {missing[:3]}, {len(extra)} only in the variant {extra[:3]}",
            fix="Evaluate both on the same tasks, limit and seed",
        )
    return np.fromiter((index[key] for key in keys_b), dtype=np.int64, count=len(keys_b))
