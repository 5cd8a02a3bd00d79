"""Registry of named tasks, with the source and licence of their data."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlflow_compress.errors import ConfigError, MissingDependencyError, require_extra
from mlflow_compress.items.task import Parts, TaskSettings
from mlflow_compress.registry import Registry


@dataclass(frozen=True, kw_only=True)
class NamedTask:
    """A task, corpus or group of tasks, with source and licence."""

    source: str  # Where the data come from: a hub id, or "embedded"
    licence: str  # Licence of the data, as their source states it
    items: str  # Number of items, and their split
    shots: str  # Number of few-shot examples; "" of a task that has none
    rule: str  # How an answer is chosen and graded
    # All but the data that decides prompts and choice of items: its SHA-256 tells versions apart. A group has none.
    definition: Callable[[], bytes] | None = None
    # Returns tasks and corpora; `shots` is None unless the user gave a number (NAME@5)
    build: Callable[[TaskSettings, int | None], Parts] | None = None
    # Names of a group's tasks, each with or without @SHOTS. A group has members instead of `build`.
    members: tuple[str, ...] = ()
    # Returns what a file holds, by the file and the task's name: of a name that a file follows (NAME:FILE)
    read: Callable[[Path, str, TaskSettings], Parts] | None = None
    # Reads what follows the name (NAME:ARGUMENT), and returns what builds the tasks; None of a name that takes nothing
    argument: Callable[[str], Callable[[TaskSettings], Parts]] | None = None
    requires: tuple[str, ...] = ()  # Import names of what it needs from an extra, and that extra
    extra: str | None = None

    def __post_init__(self) -> None:
        makes = [made for made in (self.build, self.read, self.members or None) if made is not None]
        if len(makes) != 1 or (self.definition is None) != bool(self.members):
            raise ConfigError("A named task has a definition and `build` or `read`, or the members of a group")

    def require_packages(self, name: str) -> None:
        """Raise `MissingDependencyError` where what the task, or a member of it, needs is not installed."""
        if self.extra is not None:
            require_extra(self.extra, *self.requires, by=f"Task {name!r}")
        for member in self.members:
            TASKS.get(member.partition("@")[0]).require_packages(name)

    def definition_hash(self) -> str:
        if self.definition is not None:
            return hashlib.sha256(self.definition()).hexdigest()
        parts = (f"{member} {TASKS.get(member.partition('@')[0]).definition_hash()}" for member in self.members)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


TASKS: Registry[NamedTask] = Registry(
    "task", "mlflow_compress.items.named", group="mlflow_compress.tasks", of=NamedTask
)


TASK_COLUMNS = ("task", "source", "licence", "items", "shots", "right when", "extra", "definition")


def task_rows() -> list[tuple[str, ...]]:
    """Return one row per task, groups last; its definition's SHA-256 is empty where its extra is not installed."""
    listed: list[tuple[str, ...]] = []
    for name, task in sorted(TASKS.items(), key=lambda entry: (bool(entry[1].members), entry[0])):
        members = [TASKS.get(member.partition("@")[0]) for member in task.members]
        extra = ", ".join(sorted({one.extra for one in (task, *members) if one.extra is not None}))
        try:
            task.require_packages(name)
            digest = task.definition_hash()[:12]
        except MissingDependencyError:
            digest = ""
        listed.append((name, task.source, task.licence, task.items, task.shots, task.rule, extra, digest))
    return listed
