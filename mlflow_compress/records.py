"""Item-level records: the tables that scoring writes and metrics read; Arrow in memory, Parquet on disk.

Records of one model (`Items`, `OptionScores`, `TokenScores`, `Generations`, `Judgments`) have the same form for a
baseline and for a variant. Distances (`OptionDistances`, `TokenDistances`) exist for a variant only, and compare it
with its baseline row by row. `align` joins two tables on their key, and raises an error where the keys differ.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self, get_args, get_type_hints

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from mlflow_compress import files as atomic
from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.formats import upgraded

# Metadata of a stored table: how many rows were written, and in which format
_ROWS, _FORMAT = b"mlflow_compress.rows", b"mlflow_compress.format"


@dataclass(frozen=True)
class Records:
    """A table with a fixed schema and a unique key; every subclass defines both."""

    table: pa.Table  # Columns exactly as in `SCHEMA` (order included), no nulls where the schema forbids them

    NAME: ClassVar[str]  # The class's name in small letters: "option_scores" of `OptionScores`
    SCHEMA: ClassVar[pa.Schema]
    KEY: ClassVar[tuple[str, ...]]
    FORMAT: ClassVar[int] = 1  # Raised when a table's columns change: see `formats`

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
        """Return one column (object dtype for strings and lists; floats with NaN for nulls)."""
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
            told = self.table.replace_schema_metadata({_ROWS: str(len(self)), _FORMAT: str(self.FORMAT)})
            pq.write_table(told, sink, compression="zstd", write_page_checksum=True)
        return path

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read what `write` wrote, or another program's table of the same columns; a changed one is a `DataError`."""
        path = folder / f"{cls.NAME}.parquet"
        if not path.is_file():
            raise DataError(f"No {cls.NAME} records", got=str(path), fix="Run the evaluate stage again")
        try:
            table = pq.ParquetFile(path, page_checksum_verification=True).read()
            table.validate(full=True)
        except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError) as error:
            raise DataError(f"The {cls.NAME} records cannot be read: {error}", got=str(path)) from error
        metadata = table.schema.metadata or {}
        number = metadata.get(_FORMAT, str(cls.FORMAT).encode())  # another program's table has none
        found = int(number) if number.isdigit() else number
        again = "Run the evaluate stage again"
        table = upgraded(path.name, table, found, cls.FORMAT, got=str(path), error=DataError, fix=again)
        if table.schema.names != cls.SCHEMA.names:
            raise DataError(f"{cls.NAME} records have the wrong columns", allowed=cls.SCHEMA.names, got=str(path))
        written = metadata.get(_ROWS)
        if written is not None and written != str(table.num_rows).encode():
            allowed = f"{written.decode(errors='replace')} rows"
            raise DataError(f"The {cls.NAME} records are not complete", allowed=allowed, got=table.num_rows)
        try:
            typed = table.cast(cls.SCHEMA)
        except pa.ArrowException as error:
            raise DataError(f"The {cls.NAME} records have a column of another type: {error}", got=str(path)) from error
        missing = [name for name in cls.KEY if typed.column(name).null_count]
        if missing:
            raise DataError(f"The {cls.NAME} records have rows without {missing[0]}", got=str(path))
        return cls(typed)


def align(baseline: Records, variant: Records) -> np.ndarray[Any, Any]:
    """Return, for every row of `baseline`, the row of `variant` with the same key: what `variant.table.take` needs.

    Repeated keys, and keys of one side alone, are an `AlignmentError`.
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


ItemKey = tuple[str, str]
"""Task and item id."""


@dataclass(frozen=True, slots=True)
class Request:
    """One continuation to score after one context; tasks make requests, and scoring answers them."""

    task: str
    item_id: str
    permutation: int
    option: int
    content: int
    context: str
    continuation: str  # With its leading delimiter (" A"), which the next two do not count
    n_chars: int
    n_bytes: int

    @classmethod
    def of(
        cls,
        task: str,
        item_id: str,
        context: str,
        continuation: str,
        text: str,
        option: int = 0,
        *,
        content: int | None = None,
        permutation: int = 0,
    ) -> Self:
        """Return the request for an option with this text; `content` is its number where that is not given."""
        shown = option if content is None else content
        length, size = len(text), len(text.encode())
        return cls(task, item_id, permutation, option, shown, context, continuation, length, size)


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction: the user's message of each turn (one or two), and reference answers if there are any."""

    item_id: str
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] = ()


@dataclass(frozen=True)
class MetricResult:
    """One metric value with its interval and sample size."""

    name: str  # MLflow metric key, "<section>/<metric>"
    value: float  # The point estimate; never NaN (a metric that cannot be computed is not returned)
    low: float | None = None  # Bounds of the interval at `level`, None where none applies
    high: float | None = None
    level: float = 0.95  # Confidence level of the interval
    n: int = 0  # Items or tokens the value was computed from
    n_unscored: int = 0  # Items left out because they have no prediction; never counted as wrong
    task: str | None = None  # The task and category it was computed on; None means pooled
    category: str | None = None
    # Of a noise floor: the paired test's p-value of "the variant is no farther than this"; None where there is no test
    p: float | None = None


@dataclass(frozen=True, kw_only=True)
class AnswerFeedback:
    """One judgment of an answer."""

    name: str  # The judge: "mt_bench", "pairwise", ..
    value: float | None  # The rating; None if there is none
    reason: str | None  # Why there is no rating, in one word
    rationale: str  # What the judge wrote
    source: str  # The model that judged, and its prompt
    details: Mapping[str, str] = field(default_factory=dict)  # More about it, such as its repeat


@dataclass(frozen=True, kw_only=True)
class JudgedAnswer:
    """One answer that was judged."""

    model: str  # Whose answer it is: "baseline" or "variant"
    messages: Sequence[Mapping[str, str]]  # The conversation before it: "role" and "content"
    answer: str  # The answer
    tags: Mapping[str, str]  # By which traces are filtered: item, turn, category
    feedback: Sequence[AnswerFeedback]  # Every judgment of it


TOP_LADDER = (100, 20, 5)
"""Lengths of lists for which there is a bound; the longest that both models have is used."""


def _columns(kind: pa.DataType) -> Callable[..., list[pa.Field]]:
    return lambda *names: [pa.field(name, kind) for name in names]


_texts, _flags, _floats = _columns(pa.string()), _columns(pa.bool_()), _columns(pa.float64())
_shorts, _ints, _longs = _columns(pa.int16()), _columns(pa.int32()), _columns(pa.int64())
_text_lists, _token_lists, _vectors = (_columns(pa.list_(kind)) for kind in (pa.string(), pa.int32(), pa.float32()))


def _schema(*columns: list[pa.Field]) -> pa.Schema:
    return pa.schema([column for some in columns for column in some])


_ITEM_KEY = ("task", "item_id")
_ITEM = _texts(*_ITEM_KEY)
_OPTION = [*_ITEM, *_shorts("permutation", "option")]
_TOKEN = [*_ITEM, *_ints("position")]
_DIVERGENCES = _floats("kl", "kl_reverse", "js", "tv")
_TOP_TEN = _floats("top10", "rbo10")


class OptionBounds(Records):
    """What two servers' lists of most probable tokens say about the distance, averaged over an option's tokens.

    The key is that of `OptionScores`. `k` is the length of both lists. `kl` is the KL divergence in nats after all
    tokens that are not in both lists were merged into one: at most the exact one. `kept_baseline` and `kept_variant`
    are the mass of the tokens in both lists. `clipped` counts rests that were negative by rounding.
    """

    KEY = ("task", "item_id", "permutation", "option")
    SCHEMA = _schema(_OPTION, _ints("k"), _floats("kl", "kept_baseline", "kept_variant"), _ints("clipped"))


class SwapDistances(Records):
    """One row per swap and scored token: the distance of the baseline with the swap from the baseline.

    `item_id` is the text (a window of the corpus `task`), `position` the predicted token's index in it. `kl` is
    KL(baseline || swapped) of its distribution in nats, over the whole vocabulary; `top` the most probable token after
    the swap, and `same_top` whether it is the baseline's.
    """

    KEY = ("task", "swap", "item_id", "position")
    SCHEMA = _schema(
        _texts("task", "swap", "item_id"), _ints("position"), _floats("kl"), _ints("top"), _flags("same_top")
    )


class Timings(Records):
    """One row per generation step of one repeat; steps are numbered from 0, the first token.

    `batch` prompts of `prompt_tokens` tokens each were read and continued together. `seconds` is the time since they
    were handed over, at which all of them had the token of this step. `repeat` numbers the rounds: in each, baseline
    and variant were timed one after the other.
    """

    KEY = ("batch", "repeat", "step")
    SCHEMA = _schema(_shorts("batch", "repeat"), _ints("step", "prompt_tokens"), _floats("seconds"))


class ServingMemory(Records):
    """One row per process that has loaded and served the model; `process` numbers them.

    Bytes are what the model takes above the imported libraries, on the accelerator too: `resident_bytes` after it has
    generated once with each batch size, `peak_bytes` at most, from loading to the last token.
    """

    KEY = ("process",)
    SCHEMA = _schema(_shorts("process"), _longs("resident_bytes", "peak_bytes"))


class Items(Records):
    """The questions, one row per item.

    `family` is a name of `item_families.ITEM_FAMILIES`: "lettered", "lettered_six" (options E and F are added),
    "lettered_orders" (scored in every order of the answers, in lexicographic order), "cloze", "last_word", "exact",
    "ungraded" (scored, but no single option is correct: only the task's own metrics grade it), or a plug-in's.

    `rule` is how the prediction is made: "loglik" (argmax of the summed log-likelihood), "loglik_per_char" and
    "loglik_per_byte" (the same divided by the option's characters or UTF-8 bytes), "greedy" (greedy decoding gives the
    single continuation), "exact_match" (a generation equals an answer, or the task's own metric accepts it), "calls"
    (a generation makes the right calls of tools), or "number", "letter", "text" and "math" (a generation has the right
    answer behind its thought, compared as `reasoning.COMPARISONS` says; `answers` is that answer and the token limit).

    `gold` is the index of the correct option in the original order (null where answers are generated; 0 for
    "greedy"). `prompt` is the complete prompt for permutation 0, `question` only the question.

    `group_id` names what several items of a task have in common (the passage that they ask about, the conversation they
    are from): their answers are not independent. It is null where an item shares nothing.
    """

    KEY = ("task", "item_id")
    SCHEMA = _schema(
        _ITEM,
        _texts("family", "rule", "category", "group_id", "question", "prompt"),
        _text_lists("options"),
        _ints("gold"),
        _text_lists("answers"),
    )


class Draws(Records):
    """How the items of a sample were drawn, one row per item: at random within a stratum.

    Strata are numbered from the smallest lead of the baseline upwards. `stratum_size` counts the stratum's items, of
    which `drawn` were drawn. `probability` is their quotient, and its inverse the item's weight. Where there is no such
    table, every item was scored.
    """

    KEY = ("task", "item_id")
    SCHEMA = _schema(_ITEM, _ints("stratum", "stratum_size", "drawn"), _floats("probability"))


class OptionScores(Records):
    """One row per (item, permutation, displayed option).

    `permutation` 0 is the original order, 1 and above are shuffles. `option` is the displayed position (letter index),
    `content` the original index of the option at this position. `loglik` is the summed log-likelihood in nats, `greedy`
    whether every token of the option is the argmax. `n_chars` and `n_bytes` count the option's text without its leading
    delimiter.
    """

    KEY = ("task", "item_id", "permutation", "option")
    SCHEMA = _schema(
        _OPTION, _shorts("content"), _floats("loglik"), _ints("n_tokens", "n_chars", "n_bytes"), _flags("greedy")
    )


class OptionDistances(Records):
    """Distance of the variant's next-token distributions from the baseline's, averaged over an option's tokens.

    The key is that of `OptionScores`. `kl` = mean KL(P_b || P_q) in nats, `kl_reverse` = mean KL(P_q || P_b), `js` =
    Jensen-Shannon divergence in nats, `tv` = total variation in [0, 1], `same_top` = share of tokens with equal argmax,
    `top10` = share of the ten most probable tokens that both models have, `rbo10` = rank-biased overlap of these ten.
    """

    KEY = OptionScores.KEY
    SCHEMA = _schema(_OPTION, _DIVERGENCES, _floats("same_top"), _TOP_TEN)


class TokenScores(Records):
    """One row per scored corpus token. `item_id` is the window, `position` the token's index in it.

    `nll` is in nats, `p_target` the target's probability, `argmax` the most probable token, `entropy` in nats.
    """

    KEY = ("task", "item_id", "position")
    SCHEMA = _schema(_TOKEN, _ints("target"), _floats("nll", "p_target"), _ints("argmax"), _floats("entropy"))


class TokenDistances(Records):
    """Distance of the variant from the baseline, one row per scored corpus token; columns as in `OptionDistances`."""

    KEY = TokenScores.KEY
    SCHEMA = _schema(_TOKEN, _DIVERGENCES, _flags("same_top"), _TOP_TEN)


class Generations(Records):
    """Generated text, one row per (item, conversation turn, sample); turns are 0 and 1. `text` excludes the prompt.

    `correct` is the grade of the task's own metric. It is null where the item's `answers` decide, or nothing does.
    """

    KEY = ("task", "item_id", "turn", "sample")
    SCHEMA = _schema(_ITEM, _shorts("turn", "sample"), _texts("prompt", "text"), _ints("n_tokens"), _flags("correct"))

    def first_samples(self, column: str = "text") -> dict[tuple[str, int], str]:
        """Return the text, or another column of texts, of sample 0 by item id and turn."""
        rows = self.where(sample=0).table.select(["item_id", "turn", column]).to_pylist()
        return {(row["item_id"], row["turn"]): row[column] for row in rows}


class TokenAnswers(Records):
    """Answers of one model to instructions, as tokens, so that they can be scored without being tokenized again.

    `prompt_tokens` is what the model read. `tokens` is what it wrote, with its end token if it wrote one, and `text` is
    the same without special tokens. The tokens ``tokens[reasoning_begin:reasoning_end]`` are the model's reasoning (the
    text between <think> and </think>); both are null where there is none.
    """

    KEY = ("task", "item_id", "sample")
    SCHEMA = _schema(
        _ITEM,
        _shorts("sample"),
        _token_lists("prompt_tokens", "tokens"),
        _texts("text"),
        _ints("reasoning_begin", "reasoning_end"),
    )

    def windows(self) -> list[str]:
        """Return each answer's `item_id` in the token records, where an answer is a window: "<item_id>/<sample>"."""
        return [f"{item_id}/{sample}" for _, item_id, sample in self.key_rows()]


class Traces(TokenAnswers):
    """The baseline's own sampled answers: a corpus, whose tokens are in `TokenScores` under the same task."""


class GreedyAnswers(TokenAnswers):
    """A model's answers under greedy decoding."""


class GreedyScores(TokenScores):
    """Scores of every token of the baseline's greedy answers, by the baseline itself or by the variant."""


class GreedyDistances(TokenDistances):
    """Distances of the variant at every token of the baseline's greedy answers."""


class Chains(TokenAnswers):
    """The baseline's own thoughts and answers to problems, drawn as its first answers are; one per problem, sample 0.

    `pieces` has the text that each token adds, special tokens too, but not that of the end token. The first `n_thought`
    tokens are the thought with its tags. ``tokens[answer_begin:answer_end]`` hold the answer that is read behind it;
    both are null where that is wrong, or there is none.
    """

    SCHEMA = _schema(
        _ITEM,
        _shorts("sample"),
        _token_lists("prompt_tokens", "tokens"),
        _text_lists("pieces"),
        _ints("n_thought", "answer_begin", "answer_end"),
    )


class ChainScores(TokenScores):
    """Scores of every token of the baseline's chains, by the baseline itself or by the variant."""


class ChainDistances(TokenDistances):
    """Distances of the variant at every token of the baseline's chains."""


class Judgments(Records):
    """A judge's rating of one answer: `score` from 1 to 10, or null where there is none.

    `reason` says in one word why there is no score ("ambiguous", "http_500", ...), and is null where there is one.
    `judgment` is the judge's last reply, or what went wrong. `judge` is the model that answered, and its prompt's name.

    Of a comparison, `score` is 1 if the variant's answer is better, 0 if the baseline's is, 0.5 for a tie. `repeat` is
    then the order of the two: 0 with the baseline's answer first, 1 with the variant's.
    """

    KEY = ("task", "item_id", "turn", "repeat")
    SCHEMA = _schema(
        _ITEM, _shorts("turn", "repeat"), _texts("category"), _floats("score"), _texts("reason", "judgment", "judge")
    )

    @classmethod
    def of_answers(cls, judge: str, answers: Generations, rate: Callable[[str], float | None]) -> Self:
        """Return what `rate` says of each answer's text, as the ratings of `judge`."""
        rows = answers.where(sample=0).table.to_pylist()
        common = {"task": judge, "judge": judge, "repeat": 0, "judgment": ""}
        return cls.from_rows([{**row, **common, "category": None, "score": rate(row["text"])} for row in rows])


@dataclass(frozen=True)
class RunRecords:
    """All records of one evaluated model; a field is None where that part was not run."""

    items: Items | None = None
    draws: Draws | None = None
    option_scores: OptionScores | None = None
    option_distances: OptionDistances | None = None
    option_bounds: OptionBounds | None = None
    token_scores: TokenScores | None = None
    token_distances: TokenDistances | None = None
    generations: Generations | None = None
    judgments: Judgments | None = None
    traces: Traces | None = None
    greedy_answers: GreedyAnswers | None = None
    greedy_scores: GreedyScores | None = None
    greedy_distances: GreedyDistances | None = None
    chains: Chains | None = None
    chain_scores: ChainScores | None = None
    chain_distances: ChainDistances | None = None
    timings: Timings | None = None
    serving_memory: ServingMemory | None = None

    @property
    def has_answers(self) -> bool:
        """Whether any option was scored, or any answer generated."""
        return bool(len(self.option_scores or ()) or len(self.generations or ()))

    def write(self, folder: Path) -> list[Path]:
        """Write every table that exists as Parquet, and return the paths."""
        return [getattr(self, f.name).write(folder) for f in fields(self) if getattr(self, f.name) is not None]

    @classmethod
    def read(cls, folder: Path, *, of_items: bool = False) -> "RunRecords":
        """Read every table that exists, or those of items alone; a folder without any is a `DataError`."""
        there = {name: kind for name, kind in _KINDS.items() if (folder / f"{name}.parquet").is_file()}
        if not there:
            raise DataError("No records in the folder", got=str(folder))
        return cls(**{name: kind.read(folder) for name, kind in there.items() if name in _OF_ITEMS or not of_items})

    def of_items(self, keys: Collection[ItemKey]) -> "RunRecords":
        """Return the records with those of some items alone; records of running text are kept whole."""
        wanted, kept = set(keys), {}
        for name in _OF_ITEMS:
            if (table := getattr(self, name)) is not None:
                names = zip(*(table.table.column(part).to_pylist() for part in _ITEM_KEY), strict=True)
                kept[name] = type(table)(table.table.filter(pa.array([key in wanted for key in names], pa.bool_())))
        return replace(self, **kept)

    def with_records(self, other: "RunRecords") -> "RunRecords":
        """Return these records together with the other's; a table that both have is the other's."""
        theirs = {f.name: getattr(other, f.name) for f in fields(other)}
        return replace(self, **{name: table for name, table in theirs.items() if table is not None})


_OF_ITEMS = ("items", "draws", "option_scores", "option_distances", "option_bounds", "generations")
_KINDS: dict[str, Any] = {name: get_args(hint)[0] for name, hint in get_type_hints(RunRecords).items()}


class Embeddings(Records):
    """One vector per sampled answer of a model; only those of one `encoder_id`, the encoder's digest, are compared."""

    KEY = ("task", "item_id", "sample")
    SCHEMA = _schema(_ITEM, _shorts("sample"), _texts("encoder", "encoder_id"), _vectors("vector"))

    @classmethod
    def from_array(
        cls, task: str, item_ids: Sequence[str], vectors: npt.NDArray[np.float32], *, encoder: str, encoder_id: str
    ) -> "Embeddings":
        """Return the records of an array of shape (n, k, d): k samples of each of n instructions."""
        n, k, d = vectors.shape
        flat = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1))
        return cls.from_columns(
            {
                "task": [task] * (n * k),
                "item_id": [item for item in item_ids for _ in range(k)],
                "sample": list(range(k)) * n,
                "encoder": [encoder] * (n * k),
                "encoder_id": [encoder_id] * (n * k),
                "vector": pa.ListArray.from_arrays(np.arange(0, n * k * d + 1, d, dtype=np.int32), flat),
            }
        )

    def by_instruction(self) -> tuple[tuple[str, ...], npt.NDArray[np.float32]]:
        """Return the instructions in the order of their ids, and their vectors, shape (n, k, d)."""
        table = self.table.sort_by([(name, "ascending") for name in self.KEY])
        keys, values = type(self)(table).key_rows(), table.column("vector").to_pylist()
        items = tuple(dict.fromkeys(item for _, item, _ in keys))
        lengths = {len(vector or ()) for vector in values}
        k = len(keys) // max(len(items), 1)
        if len(lengths) != 1 or len(items) * k != len(keys) or len(set(keys)) != len(keys):
            got = f"{len(keys)} vectors of {len(items)} instructions"
            raise DataError("These embeddings are not complete", got=got)
        return items, np.array(values, dtype=np.float32).reshape(len(items), k, -1)
