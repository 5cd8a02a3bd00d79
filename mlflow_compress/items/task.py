"""What a task is, and the registry of task families."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlflow_compress.item_families import ITEM_FAMILIES, ItemFamily
from mlflow_compress.records import Items, Request, RunRecords
from mlflow_compress.registry import Registry

Row = Mapping[str, Any]  # one line of a question file, with its line number under "line"


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """How items are drawn and shown.

    Attributes
    ----------
    shots : int
        Few-shot examples.
    shuffles : int
        Answer orders that an item is shown in besides the original one.
    seed : int
        Of every draw.
    limit : int
        Items per category; 0 takes all.
    all_orders : int
        Items per lettered task that are shown in every answer order too, as a task of their own; 0 for none.
    shuffle_examples : bool
        Whether a shuffle reorders the answers of the few-shot examples as well.
    prompt : str
        Prompt styles of lettered tasks, comma-separated (see `prompt_style`); 'auto' is the task's own.
    data_dir : str
        Folder of data sets in hub layout ("" for none): the data set ORG/NAME lies in data_dir/ORG/NAME.
    apply_chat_template : bool
        Whether lettered tasks and those of lm-evaluation-harness are shown in the chat template of the baseline's
        tokenizer.
    fewshot_as_multiturn : bool
        Whether the few-shot examples of the latter are turns of their own there, or stand in the user's one turn.
    system_prompt : str
        What stands before them there; "" for nothing.
    model : str
        The baseline parameter.
    """

    shots: int = 5
    shuffles: int = 2
    seed: int = 42
    limit: int = 0
    all_orders: int = 0
    shuffle_examples: bool = False
    prompt: str = "auto"
    data_dir: str = ""
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = True
    system_prompt: str = ""
    model: str = ""


@dataclass(frozen=True, kw_only=True)
class Answering:
    """How the answers of a task are generated greedily, and who says which are right.

    Attributes
    ----------
    until : tuple of str
        Where an answer ends; the mark itself is cut off.
    max_new_tokens : int
        Longest answer.
    judge : callable or None
        From the answers, by item id, to right or wrong (None where the task does not say); without it an answer is
        right when it equals one of the item's `answers`.
    """

    until: tuple[str, ...] = ("\n",)
    max_new_tokens: int = 32
    judge: Callable[[Mapping[str, str]], Mapping[str, bool | None]] | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class OwnMetric:
    """A number that a task's source computes in its own way, from our records.

    Attributes
    ----------
    part : str
        Task or group that it is about.
    metric : str
        The source's name for it.
    filter : str
        Which of the source's ways to read an answer it was computed from; "none" for the answer as it is.
    value : float
    n, n_unscored : int
        Items it was computed from, and items left out because the model could not be asked.
    """

    part: str
    metric: str
    filter: str = "none"
    value: float
    n: int
    n_unscored: int

    @property
    def name(self) -> str:
        """The metric, with its filter where it has one: "acc", "exact_match.strict-match"."""
        return self.metric if self.filter == "none" else f"{self.metric}.{self.filter}"


@dataclass(frozen=True, kw_only=True)
class GroupAverages:
    """How the source averages a group whose members are tasks of their own here.

    Attributes
    ----------
    name : str
        The group that was asked for.
    average : callable
        From the metrics of the members to those of the group, and of the groups within it.
    """

    name: str
    average: Callable[[Sequence[OwnMetric]], list[OwnMetric]] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One evaluated task.

    Attributes
    ----------
    name, family : str
        The task's name in records and its family (see `Items`).
    items : Items
        One row per item.
    requests : tuple of Request
        What scoring is asked; empty for families whose answer is generated.
    answering : Answering or None
        How answers are generated, for families that are answered.
    documents : tuple of str
        Texts of which every token is scored (rolling tasks, which have no items).
    own_metrics : callable or None
        The source's own metrics, from a run's records.
    chat : bool
        Whether prompts and contexts are a user's messages, which `chat.rendered` turns into what a model reads.
    """

    name: str
    family: str
    items: Items
    requests: tuple[Request, ...] = field(default=(), repr=False)
    answering: Answering | None = None
    chat: bool = False
    documents: tuple[str, ...] = field(default=(), repr=False)
    own_metrics: Callable[[RunRecords], list[OwnMetric]] | None = field(default=None, repr=False)

    def content_hash(self) -> str:
        """Return a SHA-256 over everything a model is shown and judged by: items, prompts, shots, options, gold."""
        digest = hashlib.sha256(repr(self.items.table.to_pydict()).encode())
        for request in self.requests:
            digest.update(repr(request).encode())
        if self.answering is not None:
            digest.update(repr((self.answering.until, self.answering.max_new_tokens)).encode())
        for document in self.documents:
            digest.update(repr(document).encode())
        if self.chat:
            digest.update(b"chat")
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text whose tokens are scored in windows.

    Attributes
    ----------
    name, text : str
    max_tokens : int or None
        How many of its first tokens are scored; None for all.
    """

    name: str
    text: str = field(repr=False)
    max_tokens: int | None = None

    def content_hash(self) -> str:
        """Return a SHA-256 over the text, and over how much of it is scored where that is said."""
        cut = "" if self.max_tokens is None else f"first {self.max_tokens} tokens of "
        return hashlib.sha256((cut + self.text).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a name or file of `-P tasks=` stands for."""

    tasks: tuple[Task, ...] = ()
    corpora: tuple[Corpus, ...] = ()
    averages: tuple[GroupAverages, ...] = ()

    @staticmethod
    def join(several: Sequence[Parts]) -> Parts:
        """Return them as one."""
        return Parts(
            tasks=tuple(task for parts in several for task in parts.tasks),
            corpora=tuple(corpus for parts in several for corpus in parts.corpora),
            averages=tuple(averages for parts in several for averages in parts.averages),
        )


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of task: the fields its question files must have, how rows become tasks, and what their items are.

    Attributes
    ----------
    fields : mapping of str to type
        Required fields of a row beside "id" and "category"; they decide which family a file belongs to.
    optional : mapping of str to type
        Fields that a row may have.
    check : callable (row) -> None
        Raises `DataError` for a row that has the fields but cannot be used.
    build : callable (name, rows, settings) -> list of Task
        Tasks of one file; lettered files give two or three, see `lettered`.
    items : mapping of str to ItemFamily
        Properties of the items that `build` makes, by the name in their column `family`. Metrics read them.
    """

    fields: Mapping[str, type]
    check: Callable[[Row], None]
    build: Callable[[str, Sequence[Row], TaskSettings], list[Task]]
    items: Mapping[str, ItemFamily]
    optional: Mapping[str, type] = field(default_factory=dict)


FAMILIES: Registry[Family] = Registry("task family", "mlflow_compress.items.families", group="mlflow_compress.tasks")


def register_family(name: str, family: Family) -> None:
    """Register a family and the properties of its items."""
    for kind, properties in family.items.items():
        ITEM_FAMILIES.register(kind)(properties)
    FAMILIES.register(name)(family)


def seeded(settings: TaskSettings, *parts: object) -> random.Random:
    """Return a generator seeded by the seed and `parts` only: an item's draw never depends on its neighbours."""
    digest = hashlib.sha256(repr((settings.seed, *parts)).encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))


def limited(name: str, rows: Sequence[Row], settings: TaskSettings) -> list[Row]:
    """Return the first `settings.limit` rows of every category after a seeded shuffle, in file order; all when 0."""
    if not settings.limit:
        return list(rows)
    by_category: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        by_category.setdefault(row["category"], []).append(index)
    kept: set[int] = set()
    for category, indices in by_category.items():
        seeded(settings, name, category).shuffle(indices)
        kept.update(indices[: settings.limit])
    return [rows[index] for index in sorted(kept)]


def item_row(task: str, family: str, rule: str, row: Row, **columns: Any) -> dict[str, Any]:
    """Return one row of `Items` from a question-file row; columns that a family does not have are null."""
    return {
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


def request(
    task: str, row: Row, context: str, text: str, *, option: int = 0, content: int = 0, permutation: int = 0
) -> Request:
    """Return the request for `text` as the continuation of `context`, after one blank."""
    return Request(
        task=task,
        item_id=row["id"],
        permutation=permutation,
        option=option,
        content=content,
        context=context,
        continuation=f" {text}",
        n_chars=len(text),
        n_bytes=len(text.encode()),
    )
