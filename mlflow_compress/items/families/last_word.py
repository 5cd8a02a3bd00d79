"""Last-word prediction: correct if greedy decoding gives every token of the target."""

from __future__ import annotations

from collections.abc import Sequence

from mlflow_compress.errors import DataError
from mlflow_compress.item_families import ItemFamily
from mlflow_compress.items.task import Family, Row, Task, TaskSettings, item_row, limited, register_family, request
from mlflow_compress.records import Items


def _check(row: Row) -> None:
    if not row["target"].strip():
        raise DataError("'target' must not be empty")


def _build(name: str, rows: Sequence[Row], settings: TaskSettings) -> list[Task]:
    sample = limited(name, rows, settings)
    items = [
        item_row(
            name,
            "last_word",
            "greedy",
            row,
            question=row["context"],
            prompt=row["context"],
            options=[row["target"]],
            gold=0,
        )
        for row in sample
    ]
    requests = tuple(request(name, row, row["context"], row["target"]) for row in sample)
    return [Task(name=name, family="last_word", items=Items.from_rows(items), requests=requests)]


register_family(
    "last_word",
    Family(
        fields={"context": str, "target": str},
        check=_check,
        build=_build,
        items={"last_word": ItemFamily(graded=True)},
    ),
)
