"""The table of named tasks, for `mlflow-compress tasks` and the documentation."""

from __future__ import annotations

from mlflow_compress.items.named_tasks import TASKS

COLUMNS = ("task", "source", "licence", "items", "shots", "right when", "definition")


def rows() -> list[tuple[str, ...]]:
    """Return one row per task, groups last. The last column is the beginning of the definition's SHA-256."""
    found = sorted(TASKS.items(), key=lambda entry: (bool(entry[1].members), entry[0]))
    return [(n, t.source, t.licence, t.items, t.shots, t.rule, t.definition_hash()[:12]) for n, t in found]


def as_markdown() -> str:
    """Return the table as Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for name, *middle, digest in rows():
        lines.append("| " + " | ".join([f"`{name}`", *middle, f"`{digest}`"]) + " |")
    return "\n".join(lines)
