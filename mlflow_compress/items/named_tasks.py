"""Registry of named tasks, with the source and licence of their data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from mlflow_compress.errors import ConfigError
from mlflow_compress.items.task import Parts, TaskSettings
from mlflow_compress.registry import Registry


@dataclass(frozen=True, kw_only=True)
class NamedTask:
    """A task, corpus or group of tasks, with source and licence."""

    source: str  # Where the data come from: a hub id, or "embedded"
    licence: str  # Licence of the data, as their source states it
    items: str  # Number of items, and their split
    shots: str  # Number of few-shot examples
    rule: str  # How an answer is chosen and graded
    # Everything except the data that decides prompts and choice of items. Its SHA-256 distinguishes two versions of a
    # task. (Each run also logs a hash of prompts and data.) A group is defined by its members.
    definition: Callable[[], bytes] | None = None
    # Returns tasks and corpora; `shots` is None unless the user gave a number (NAME@5)
    build: Callable[[TaskSettings, int | None], Parts] | None = None
    # Names of a group's tasks, each with or without @SHOTS. A group has members instead of `build`.
    members: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.build is None) != bool(self.members) or (self.build is None) != (self.definition is None):
            raise ConfigError("A named task has a definition and `build`, or the members of a group")

    def definition_hash(self) -> str:
        if self.definition is not None:
            return hashlib.sha256(self.definition()).hexdigest()
        parts = (f"{member} {TASKS.get(member.partition('@')[0]).definition_hash()}" for member in self.members)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


TASKS: Registry[NamedTask] = Registry(
    "task", "mlflow_compress.items.named", group="mlflow_compress.tasks", of=NamedTask
)


COLUMNS = ("task", "source", "licence", "items", "shots", "right when", "definition")


def rows() -> list[tuple[str, ...]]:
    """Return one row per task, groups last. The last column is the beginning of the definition's SHA-256."""
    found = sorted(TASKS.items(), key=lambda entry: (bool(entry[1].members), entry[0]))
    return [(n, t.source, t.licence, t.items, t.shots, t.rule, t.definition_hash()[:12]) for n, t in found]


def tasks_markdown() -> str:
    """Return the table as Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for name, *middle, digest in rows():
        lines.append("| " + " | ".join([f"`{name}`", *middle, f"`{digest}`"]) + " |")
    return "\n".join(lines)
