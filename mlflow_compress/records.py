"""Item-level records: the data that flows from scoring to metrics, columnar in Arrow, Parquet on disk.

Single-model records (`Items`, `OptionScores`, `TokenScores`, `Generations`, `Judgments`) look the same for a
baseline and a variant. Distances (`OptionDistances`, `TokenDistances`) exist for a variant only and compare it, row by
row, with its baseline. `align` joins two tables on their key and refuses when the keys differ.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mlflow_compress.errors import AlignmentError, DataError

_KEY = [pa.field("task", pa.string()), pa.field("item_id", pa.string())]


@dataclass(frozen=True, slots=True)
class Request:
    """One continuation to score after one context: what tasks ask and scoring answers.

    `permutation`, `option` and `content` are as in `OptionScores`; `continuation` carries its leading delimiter
    (" A"), `n_chars` and `n_bytes` count the option's text without it.
    """

    task: str
    item_id: str
    permutation: int
    option: int
    content: int
    context: str
    continuation: str
    n_chars: int
    n_bytes: int


@dataclass(frozen=True)
class Records:
    """A table with a fixed schema and a unique key; every subclass states both.

    Parameters
    ----------
    table : pyarrow.Table
        Columns exactly as in `SCHEMA` (order included), no nulls where the schema forbids them.
    """

    table: pa.Table

    NAME: ClassVar[str]
    SCHEMA: ClassVar[pa.Schema]
    KEY: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        if self.table.schema.names != self.SCHEMA.names:
            raise DataError(
                f"{self.NAME} records have the wrong columns", allowed=self.SCHEMA.names, got=self.table.schema.names
            )

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> Self:
        """Build records from one array or list a column, cast to the schema."""
        missing = [name for name in cls.SCHEMA.names if name not in columns]
        if missing:
            raise DataError(f"{cls.NAME} records lack columns", got=missing)
        arrays = [pa.array(columns[f.name], type=f.type) for f in cls.SCHEMA]
        return cls(pa.Table.from_arrays(arrays, schema=cls.SCHEMA))

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]]) -> Self:
        """Build records from one mapping a row."""
        return cls(pa.Table.from_pylist(list(rows), schema=cls.SCHEMA))

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Stack tables of the same kind."""
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
        mask = np.ones(len(self), dtype=bool)
        for name, wanted in equal.items():
            values = self.column(name)
            if isinstance(wanted, list | tuple | set | frozenset):
                mask &= np.isin(values, list(wanted))
            else:
                mask &= values == wanted
        return type(self)(self.table.filter(pa.array(mask)))

    def write(self, folder: Path) -> Path:
        """Write `<folder>/<NAME>.parquet` atomically (temporary file, fsync, rename) and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.NAME}.parquet"
        partial = path.with_suffix(".parquet.partial")
        with partial.open("wb") as sink:
            pq.write_table(self.table, sink, compression="zstd")
            sink.flush()
            os.fsync(sink.fileno())
        partial.replace(path)
        return path

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read what `write` wrote; a missing or unreadable file is a `DataError`."""
        path = folder / f"{cls.NAME}.parquet"
        if not path.is_file():
            raise DataError(f"No {cls.NAME} records", got=str(path), fix="Run the evaluate stage again")
        try:
            table = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"The {cls.NAME} records cannot be read: {error}", got=str(path)) from error
        if table.schema.names != cls.SCHEMA.names:
            raise DataError(f"{cls.NAME} records have the wrong columns", allowed=cls.SCHEMA.names, got=str(path))
        return cls(table.cast(cls.SCHEMA))


class Items(Records):
    """The questions: one row an item.

    `family` is one of "lettered", "lettered_six" (options E and F added), "cloze", "last_word", "exact"; `rule` says
    how a prediction is taken: "loglik" (argmax of the summed log-likelihood), "loglik_per_char" (the same divided by
    the option's character count), "greedy" (the single continuation is what greedy decoding gives), "exact_match" (a
    generation equals an answer). `gold` is the index of the right option in the original order (null for
    "exact_match"; 0 for "greedy"); `prompt` is what the model saw for permutation 0, `question` the question alone.
    """

    NAME = "items"
    KEY = ("task", "item_id")
    SCHEMA = pa.schema(
        [
            *_KEY,
            pa.field("family", pa.string()),
            pa.field("rule", pa.string()),
            pa.field("category", pa.string()),
            pa.field("question", pa.string()),
            pa.field("prompt", pa.string()),
            pa.field("options", pa.list_(pa.string())),
            pa.field("gold", pa.int32()),
            pa.field("answers", pa.list_(pa.string())),
        ]
    )


class OptionScores(Records):
    """One row an item, permutation and shown option.

    `permutation` 0 is the original order, 1.. are shuffles; `option` is the shown position (letter index), `content`
    the original index of what stands there. `loglik` is the summed log-likelihood in nats, `greedy` whether every
    token of the option is the argmax. `n_chars` and `n_bytes` count the option's text without its leading delimiter.
    """

    NAME = "option_scores"
    KEY = ("task", "item_id", "permutation", "option")
    SCHEMA = pa.schema(
        [
            *_KEY,
            pa.field("permutation", pa.int16()),
            pa.field("option", pa.int16()),
            pa.field("content", pa.int16()),
            pa.field("loglik", pa.float64()),
            pa.field("n_tokens", pa.int32()),
            pa.field("n_chars", pa.int32()),
            pa.field("n_bytes", pa.int32()),
            pa.field("greedy", pa.bool_()),
        ]
    )


class OptionDistances(Records):
    """Distance of the variant's next-token distributions from the baseline's, averaged over an option's tokens.

    Keyed as `OptionScores`. `kl` = mean KL(P_b || P_q) in nats, `kl_reverse` = mean KL(P_q || P_b), `js` =
    Jensen-Shannon divergence in nats, `tv` = total variation in [0, 1], `same_top` = share of tokens with equal argmax.
    """

    NAME = "option_distances"
    KEY = OptionScores.KEY
    SCHEMA = pa.schema(
        [
            *_KEY,
            pa.field("permutation", pa.int16()),
            pa.field("option", pa.int16()),
            pa.field("kl", pa.float64()),
            pa.field("kl_reverse", pa.float64()),
            pa.field("js", pa.float64()),
            pa.field("tv", pa.float64()),
            pa.field("same_top", pa.float64()),
        ]
    )


class TokenScores(Records):
    """One row a scored token of a corpus: `item_id` is the window, `position` the token's index in it.

    `nll` is in nats, `p_target` the target's probability, `argmax` the most probable token, `entropy` in nats.
    """

    NAME = "token_scores"
    KEY = ("task", "item_id", "position")
    SCHEMA = pa.schema(
        [
            *_KEY,
            pa.field("position", pa.int32()),
            pa.field("target", pa.int32()),
            pa.field("nll", pa.float64()),
            pa.field("p_target", pa.float64()),
            pa.field("argmax", pa.int32()),
            pa.field("entropy", pa.float64()),
        ]
    )


class TokenDistances(Records):
    """Distance of variant from baseline at each scored corpus token; columns as in `OptionDistances`."""

    NAME = "token_distances"
    KEY = TokenScores.KEY
    SCHEMA = pa.schema(
        [
            *_KEY,
            pa.field("position", pa.int32()),
            pa.field("kl", pa.float64()),
            pa.field("kl_reverse", pa.float64()),
            pa.field("js", pa.float64()),
            pa.field("tv", pa.float64()),
            pa.field("same_top", pa.bool_()),
        ]
    )


class Generations(Records):
    """Generated text: one row an item, conversation turn (0, 1) and sample; `text` is without the prompt."""

    NAME = "generations"
    KEY = ("task", "item_id", "turn", "sample")
    SCHEMA = pa.schema(
        [
            *_KEY,
            pa.field("turn", pa.int16()),
            pa.field("sample", pa.int16()),
            pa.field("prompt", pa.string()),
            pa.field("text", pa.string()),
            pa.field("n_tokens", pa.int32()),
        ]
    )


class Judgments(Records):
    """A judge's rating of one answer: `score` in 1..10, null where no rating could be read after the retries."""

    NAME = "judgments"
    KEY = ("task", "item_id", "turn", "repeat")
    SCHEMA = pa.schema(
        [
            *_KEY,
            pa.field("turn", pa.int16()),
            pa.field("repeat", pa.int16()),
            pa.field("category", pa.string()),
            pa.field("score", pa.float64()),
            pa.field("judgment", pa.string()),
            pa.field("judge", pa.string()),
        ]
    )


@dataclass(frozen=True)
class RunRecords:
    """Everything that one evaluated model left behind; a field is None where that part was not run."""

    items: Items | None = None
    option_scores: OptionScores | None = None
    option_distances: OptionDistances | None = None
    token_scores: TokenScores | None = None
    token_distances: TokenDistances | None = None
    generations: Generations | None = None
    judgments: Judgments | None = None

    def write(self, folder: Path) -> list[Path]:
        """Write every part that is there as Parquet and return the paths."""
        return [getattr(self, f.name).write(folder) for f in fields(self) if getattr(self, f.name) is not None]

    @classmethod
    def read(cls, folder: Path) -> RunRecords:
        """Read every part that is there; a folder with none is a `DataError`."""
        kinds = (Items, OptionScores, OptionDistances, TokenScores, TokenDistances, Generations, Judgments)
        found: dict[str, Any] = {k.NAME: k.read(folder) for k in kinds if (folder / f"{k.NAME}.parquet").is_file()}
        if not found:
            raise DataError("No records in the folder", got=str(folder))
        return cls(**found)


@dataclass(frozen=True)
class MetricResult:
    """One number with what is needed to believe it.

    Attributes
    ----------
    name : str
        MLflow metric key, "<section>/<metric>".
    value : float
        The point estimate; never NaN (a metric that cannot be computed is not returned).
    low, high : float or None
        Bounds of the interval at `level`, None where none applies.
    level : float
        Confidence level of the interval.
    n : int
        Items or tokens the value was computed from.
    n_unscored : int
        Items left out because they have no prediction; never counted as wrong.
    task, category : str or None
        The part it is about; None means pooled.
    """

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    level: float = 0.95
    n: int = 0
    n_unscored: int = 0
    task: str | None = None
    category: str | None = None
    per_item: np.ndarray[Any, Any] | None = field(default=None, compare=False, repr=False)


def align(baseline: Records, variant: Records) -> np.ndarray[Any, Any]:
    """Return, for every row of `baseline`, the row of `variant` that has the same key.

    Returns
    -------
    numpy.ndarray of int, shape (n_rows,)
        `variant.table.take(result)` stands in the order of `baseline`.

    Raises
    ------
    AlignmentError
        When a key is repeated, or when the two sets of keys differ; the first missing ids are named.
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
