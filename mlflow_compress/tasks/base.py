"""What a task is, and the registry of task families."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlflow_compress.records import Items, Request
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
        Answer orders an item is shown in besides the original one.
    seed : int
        Of every draw.
    limit : int
        Items a category; 0 takes all.
    all_orders : int
        Items a lettered task that are shown in every answer order too, as a task of their own; 0 for none.
    shuffle_examples : bool
        Whether a shuffle reorders the answers of the few-shot examples as well.
    """

    shots: int = 5
    shuffles: int = 2
    seed: int = 42
    limit: int = 0
    all_orders: int = 0
    shuffle_examples: bool = False


@dataclass(frozen=True, kw_only=True)
class Task:
    """One evaluated task.

    Attributes
    ----------
    name, family : str
        The task's name in records and its family (see `Items`).
    items : Items
        One row an item.
    requests : tuple of Request
        What scoring is asked; empty for families whose answer is generated.
    """

    name: str
    family: str
    items: Items
    requests: tuple[Request, ...] = field(default=(), repr=False)

    def content_hash(self) -> str:
        """Return a SHA-256 over everything a model is shown and judged by: items, prompts, shots, options, gold."""
        digest = hashlib.sha256(repr(self.items.table.to_pydict()).encode())
        for request in self.requests:
            digest.update(repr(request).encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of task: the fields its question files must have, and how rows become tasks.

    Attributes
    ----------
    fields : mapping of str to type
        Required fields of a row beside "id" and "category"; they decide which family a file belongs to.
    check : callable (row) -> None
        Raises `DataError` for a row that has the fields but cannot be used.
    build : callable (name, rows, settings) -> list of Task
        Tasks of one file; lettered files give two or three, see `lettered`.
    """

    fields: Mapping[str, type]
    check: Callable[[Row], None]
    build: Callable[[str, Sequence[Row], TaskSettings], list[Task]]


FAMILIES: Registry[Family] = Registry("task family", "mlflow_compress.tasks")


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
