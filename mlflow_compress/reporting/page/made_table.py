"""How variants were made and measured: settings that differ, items of each task, a prompt of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from mlflow_compress.reporting.page.page_content import PageContent


@dataclass(frozen=True, kw_only=True)
class MadeRow:
    """How one variant was made; a cell is empty where its method has no such setting."""

    name: str
    run_id: str
    address: str
    cells: list[str]


@dataclass(frozen=True, kw_only=True)
class MadeTable:
    """The settings of all variants, one column per setting."""

    columns: list[str]
    rows: list[MadeRow]


def made_table(content: PageContent) -> MadeTable:
    """Return the settings of every variant."""
    names = list(dict.fromkeys(name for variant in content.variants for name in variant.settings))
    return MadeTable(
        columns=[name.replace("_", " ") for name in names],
        rows=[
            MadeRow(name=v.name, run_id=v.run_id, address=v.address, cells=[v.settings.get(name, "") for name in names])
            for v in content.variants
        ],
    )


def items_by_task(content: PageContent) -> list[dict[str, Any]]:
    """Return the number of items of each task."""
    if content.items is None:
        return []
    columns = (content.items.table.column(name).to_pylist() for name in ("task", "family"))
    counts = Counter(zip(*columns, strict=True))
    return [{"task": task, "family": family.replace("_", " "), "n": n} for (task, family), n in sorted(counts.items())]


def sample_prompts(content: PageContent) -> dict[str, str]:
    """Return the prompt of the first item of each task."""
    if content.items is None:
        return {}
    tasks = content.items.column("task")
    first = {str(task): row for row, task in reversed(list(enumerate(tasks)))}
    prompts = content.items.table.column("prompt")
    return {task: prompts[row].as_py() or "" for task, row in sorted(first.items())}
