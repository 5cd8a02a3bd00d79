"""Cloze choice: scores each option's text after the context, with log-likelihoods per character (acc_norm)."""

from __future__ import annotations

from collections.abc import Sequence

from mlflow_compress.errors import DataError
from mlflow_compress.item_families import ItemFamily
from mlflow_compress.items.task import Family, Row, Task, TaskSettings, item_row, limited, register_family, request
from mlflow_compress.records import Items


def _check(row: Row) -> None:
    choices = row["choices"]
    if len(choices) < 2 or any(not isinstance(choice, str) or not choice.strip() for choice in choices):
        raise DataError("'choices' must be two or more texts that are not empty", got=choices)
    if not 0 <= row["answer"] < len(choices):
        raise DataError("'answer' is not the index of a choice", allowed=f"0 to {len(choices) - 1}", got=row["answer"])


def _build(name: str, rows: Sequence[Row], settings: TaskSettings) -> list[Task]:
    sample = limited(name, rows, settings)
    items = [
        item_row(
            name,
            "cloze",
            "loglik_per_char",
            row,
            question=row["context"],
            prompt=row["context"],
            options=row["choices"],
            gold=row["answer"],
        )
        for row in sample
    ]
    requests = [
        request(name, row, row["context"], choice, option=index, content=index)
        for row in sample
        for index, choice in enumerate(row["choices"])
    ]
    return [Task(name=name, family="cloze", items=Items.from_rows(items), requests=tuple(requests))]


register_family(
    "cloze",
    Family(
        fields={"context": str, "choices": list, "answer": int},
        check=_check,
        build=_build,
        items={"cloze": ItemFamily(chooses=True, graded=True, headline=True)},
    ),
)
