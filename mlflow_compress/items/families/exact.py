"""Short generation: correct if the first line equals one of the answers."""

from __future__ import annotations

from collections.abc import Sequence

from mlflow_compress.errors import DataError
from mlflow_compress.item_families import ItemFamily
from mlflow_compress.items.task import Answering, Family, Row, Task, TaskSettings, item_row, limited, register_family
from mlflow_compress.records import Items


def _check(row: Row) -> None:
    if not row["answers"] or any(not isinstance(answer, str) or not answer.strip() for answer in row["answers"]):
        raise DataError("'answers' must be one or more texts that are not empty", got=row["answers"])


def _build(name: str, rows: Sequence[Row], settings: TaskSettings) -> list[Task]:
    """Return one task without requests: its answers are generated."""
    items = [
        item_row(
            name, "exact", "exact_match", row, question=row["prompt"], prompt=row["prompt"], answers=row["answers"]
        )
        for row in limited(name, rows, settings)
    ]
    return [Task(name=name, family="exact", items=Items.from_rows(items), answering=Answering())]


register_family(
    "exact",
    Family(
        fields={"prompt": str, "answers": list},
        check=_check,
        build=_build,
        items={"exact": ItemFamily(graded=True)},
    ),
)
