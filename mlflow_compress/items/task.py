"""Tasks, corpora, their settings, and the registry of task families."""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from itertools import accumulate
from operator import itemgetter
from typing import Any, Literal, TypeVar

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.item_families import ITEM_FAMILIES, ItemFamily
from mlflow_compress.records import Chains, Items, Request, RunRecords, Traces
from mlflow_compress.registry import Registry

T = TypeVar("T")

TRACE_TASK = "traces"
Row = Mapping[str, Any]  # one line of a question file, with its line number under "line"


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """How items are drawn and shown: parameters of the command line, by their names; "" is none."""

    num_fewshot: int = 5
    num_shuffles: int = 2
    seed: int = 42
    limit: int = 0
    all_orders: int = 0
    shuffle_fewshot: bool = False
    prompt_style: str = "auto"
    redact: str = ""
    data_dir: str = ""  # The data set ORG/NAME is in data_dir/ORG/NAME
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = True
    system_prompt: str = ""
    enable_thinking: bool = True
    thinking_samples: int = 8
    thinking_max_new_tokens: int | Literal["auto"] = "auto"
    model: str = ""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn; by default from the whole distribution."""

    temperature: float = 1.0
    top_k: int = 0  # 0 means all
    top_p: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Answering:
    """How the answers of a task are generated (one greedily, `samples` more drawn), and how they are graded."""

    until: tuple[str, ...] = ("\n",)  # Stop sequences; the answer is cut before the first one
    max_new_tokens: int = 32  # Longest answer, in tokens
    # Returns which answers are correct by item id, None where none is graded; without it, those that are in `answers`
    judge: Callable[[Mapping[str, str]], Mapping[str, bool | None]] | None = field(default=None, repr=False)
    # Answers per item that are drawn besides the greedy one; the baseline draws as many a second time
    samples: int = 0
    sampling: Sampling = Sampling()  # With which they are drawn
    # Whether the chat template lets the model think first (`enable_thinking`); None where the template is not told
    thinking: bool | None = None
    end_tokens: frozenset[int] = frozenset()  # End an answer, besides those of the model


@dataclass(frozen=True, kw_only=True)
class HarnessMetric:
    """A number that lm-evaluation-harness's own code computes from our records."""

    part: str  # Name of the task or group
    metric: str  # The harness's name of the metric
    filter: str = "none"  # The harness's filter that extracts the answer from the text; "none" for the text as it is
    value: float
    n: int  # Number of items behind the value, and of items left out because an option exceeds the context
    n_unscored: int

    @property
    def name(self) -> str:
        """The metric's name, with its filter if it has one: "acc", "exact_match.strict-match"."""
        return self.metric if self.filter == "none" else f"{self.metric}.{self.filter}"


@dataclass(frozen=True, kw_only=True)
class GroupAverages:
    """How the harness averages a group whose members are separate tasks here."""

    name: str  # The group that the user has named
    # Takes the metrics of the members; returns those of the group and of the groups within it
    average: Callable[[Sequence[HarnessMetric]], list[HarnessMetric]] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One evaluated task."""

    name: str  # The task's name in the records, and its family (see `Items`)
    family: str
    items: Items  # One row per item
    # What is scored; empty for families with generated answers
    requests: tuple[Request, ...] = field(default=(), repr=False)
    answering: Answering | None = None  # How answers are generated; None where no answer is generated
    # Whether prompts are user messages. `suite.rendered` turns them into the text that a model reads.
    chat: bool = False
    # Whether prompts are lists of messages in JSON, or objects with `messages` and `tools`, which it renders too
    conversations: bool = False
    calls: bool = False
    # Texts whose every token is scored (rolling tasks, which have no items)
    documents: tuple[str, ...] = field(default=(), repr=False)
    # The baseline's own thoughts about some of its problems; None as long as they are not written, or for other tasks
    chains: Chains | None = field(default=None, repr=False)
    # Computes the harness's own metrics from the records of a run
    harness_metrics: Callable[[RunRecords], list[HarnessMetric]] | None = field(default=None, repr=False)

    def content_hash(self) -> str:
        """Return a SHA-256 over items, their groups, prompts, few-shot examples, options and gold answers.

        The harness's version is part of it where its code computes metrics.
        """
        table = self.items.table
        if table.column("group_id").null_count == len(table):  # what no task has changes no task's hash
            table = table.drop_columns(["group_id"])
        digest = hashlib.sha256(repr(table.to_pydict()).encode())
        contexts: dict[str, int] = {}  # a context is hashed once, with the first of its options
        others = [one.name for one in fields(Request) if one.name != "context"]
        for request in self.requests:
            if request.context not in contexts:
                contexts[request.context] = len(contexts)
                digest.update(repr(request.context).encode())
            digest.update(repr([contexts[request.context], *(getattr(request, name) for name in others)]).encode())
        if self.answering is not None:
            digest.update(repr((self.answering.until, self.answering.max_new_tokens)).encode())
            if self.answering.samples:
                digest.update(f"{self.answering.samples} samples".encode())
            if self.answering.sampling != Sampling():
                digest.update(repr(self.answering.sampling).encode())
        for document in self.documents:
            digest.update(repr(document).encode())
        if self.chains is not None:
            rows = self.chains.table.select(["item_id", "prompt_tokens", "tokens"]).to_pylist()
            digest.update(repr([[*row.values()] for row in rows]).encode())
        if self.chat or self.conversations or self.calls:
            digest.update(b"chat")
        if self.harness_metrics is not None:
            digest.update(f"lm_eval {version('lm_eval')}".encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text whose tokens are scored in windows."""

    name: str
    text: str = field(repr=False)
    max_tokens: int | None = None  # Tokens that are scored, from the beginning; None for all
    starts: tuple[int, ...] = field(default=(), repr=False)  # Characters at which its documents begin; empty if unknown

    @classmethod
    def of(cls, name: str, documents: Sequence[str], *, between: str = "", max_tokens: int | None = None) -> "Corpus":
        ends = accumulate(len(document) + len(between) for document in documents)
        return cls(name=name, text=between.join(documents), max_tokens=max_tokens, starts=(0, *ends)[:-1])

    def content_hash(self) -> str:
        """Return a SHA-256 over the text and, if they are set, `max_tokens` and `starts`."""
        cut = "" if self.max_tokens is None else f"first {self.max_tokens} tokens of "
        cut += f"documents from {self.starts}: " if self.starts else ""
        return hashlib.sha256((cut + self.text).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class TraceCorpus:
    """Text that the baseline itself has written."""

    name: str = TRACE_TASK
    # The answers; None as long as the baseline has not written them
    answers: Traces | None = field(default=None, repr=False)

    def content_hash(self) -> str:
        """Return a SHA-256 over the tokens of prompts and answers. Before they are written no evaluation has it."""
        digest = hashlib.sha256(b"traces")
        for row in [] if self.answers is None else self.answers.table.to_pylist():
            digest.update(repr((row["item_id"], row["sample"], row["prompt_tokens"], row["tokens"])).encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Tasks and corpora behind one name or file of `-P tasks=`."""

    tasks: tuple[Task, ...] = ()
    corpora: tuple[Corpus | TraceCorpus, ...] = ()
    averages: tuple[GroupAverages, ...] = ()

    @staticmethod
    def join(several: "Sequence[Parts]") -> "Parts":
        return Parts(
            tasks=tuple(task for parts in several for task in parts.tasks),
            corpora=tuple(corpus for parts in several for corpus in parts.corpora),
            averages=tuple(averages for parts in several for averages in parts.averages),
        )


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of task: the fields of its question files, how rows become tasks, and the properties of its items."""

    # Required fields of a row, in addition to "id" and "category". They decide which family a file belongs to.
    fields: Mapping[str, type]
    # Tasks of one file; a lettered file gives two or three, see `lettered`
    build: Callable[[str, Sequence[Row], TaskSettings], list[Task]]
    # Properties of the items that `build` makes, by the value of their column `family`. Metrics read them.
    items: Mapping[str, ItemFamily]
    optional: Mapping[str, type] = field(default_factory=dict)  # Fields that a row may have
    check: Callable[[Row], None] = lambda row: None  # Raises `DataError` for unusable values in the right fields


FAMILIES: Registry[Family] = Registry(
    "task family", "mlflow_compress.items.families", group="mlflow_compress.tasks", of=Family
)


def register_family(name: str, family: Family) -> None:
    """Register a family and the properties of its items."""
    for kind, properties in family.items.items():
        ITEM_FAMILIES.register(kind)(properties)
    FAMILIES.register(name)(family)


def check_answer(row: Row) -> None:
    """Refuse an answer that is not the index of a choice."""
    if not 0 <= row["answer"] < len(row["choices"]):
        allowed = f"0 to {len(row['choices']) - 1}"
        raise DataError("'answer' is not the index of a choice", allowed=allowed, got=row["answer"])


def check_tasks(tasks: object, origin: str) -> None:
    """Refuse tasks that no evaluation could score; `origin` says whose they are (see `Registry.origin`)."""

    def fault(task: object) -> str | None:
        if not isinstance(task, Task):
            return f"{type(task).__name__} instead of a Task"
        if not isinstance(task.items, Items) or not all(isinstance(request, Request) for request in task.requests):
            return f"task {task.name!r}, whose items are no Items or whose requests are no Requests"
        keys = task.items.key_rows()
        if len(set(keys)) < len(keys):
            return f"task {task.name!r}, which has two items of one id"
        families = set(task.items.table.column("family").to_pylist()) - set(ITEM_FAMILIES.names())
        if families:
            return f"task {task.name!r} with items of unknown families: {', '.join(map(repr, sorted(families)))}"
        if unknown := {(request.task, request.item_id) for request in task.requests} - set(keys):
            return f"task {task.name!r} with a request of an unknown item: {min(unknown)}"
        return None

    several = list(tasks) if isinstance(tasks, list | tuple) else [tasks]
    for wrong in filter(None, map(fault, several)):
        raise ConfigError(f"The {origin} returned {wrong}", fix="Repair or uninstall that package")


def seeded(settings: TaskSettings, *parts: object) -> random.Random:
    """Return a random generator, seeded with the seed and `parts` only, so that no draw depends on other items."""
    digest = hashlib.sha256(repr((settings.seed, *parts)).encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))


def limited(
    name: str, rows: Sequence[T], settings: TaskSettings, category: Callable[[Any], str] = itemgetter("category")
) -> list[T]:
    """Return a seeded sample of `settings.limit` rows per category, in file order; all rows if the limit is 0."""
    if not settings.limit:
        return list(rows)
    by_category: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        by_category.setdefault(category(row), []).append(index)
    chosen: set[int] = set()
    for one, indices in by_category.items():
        seeded(settings, name, one).shuffle(indices)
        chosen.update(indices[: settings.limit])
    return [rows[index] for index in sorted(chosen)]


def group_of(text: str | None) -> str | None:
    """Return the `group_id` of items that share a text, such as a passage; None without one."""
    return hashlib.sha256(text.strip().encode()).hexdigest()[:16] if text and text.strip() else None


def item_row(task: str, family: str, rule: str, row: Row, **columns: Any) -> dict[str, Any]:
    """Return one row of `Items` for a row of a question file; columns that the family does not have are null."""
    return {
        "group_id": row.get("group_id"),
        "task": task,
        "item_id": row["id"],
        "family": family,
        "rule": rule,
        "category": row["category"],
        "options": None,
        "gold": None,
        "answers": None,
        **columns,
    }


def request(task: str, row: Row, context: str, text: str, option: int = 0, **more: Any) -> Request:
    """Return the request that scores `text` as the continuation of `context`, after one space."""
    return Request.of(task, row["id"], context, f" {text}", text, option, **more)
