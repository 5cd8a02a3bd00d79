"""Tasks that have a name of ours: what they are, where they come from, and how they are built."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from mlflow_compress.items.task import Parts, TaskSettings
from mlflow_compress.registry import Registry


@dataclass(frozen=True, kw_only=True)
class NamedTask:
    """A task, corpus or group with its papers.

    Attributes
    ----------
    source : str
        Where the data come from: a hub id, or "embedded".
    licence : str
        Of the data, as their origin states it.
    items : str
        How many there are, and of which split.
    shots : str
        Few-shot examples.
    rule : str
        What is right, and which argmax flips are taken from.
    definition : callable () -> bytes, optional
        What fixes prompts and choice of items, without the data: its SHA-256 tells two versions of a task apart. (Each
        run logs the hash of what was really asked, data included.) A group's is that of its members.
    build : callable (settings, shots) -> Parts, optional
        Makes tasks and corpora; `shots` is None unless the user asked for a number (NAME@5).
    members : tuple of str
        For a group instead of `build`: names with or without shots, as the user could give them.
    """

    source: str
    licence: str
    items: str
    shots: str
    rule: str
    definition: Callable[[], bytes] | None = None
    build: Callable[[TaskSettings, int | None], Parts] | None = None
    members: tuple[str, ...] = ()

    def definition_hash(self) -> str:
        """Return the SHA-256 of the definition."""
        if self.definition is not None:
            return hashlib.sha256(self.definition()).hexdigest()
        parts = (f"{member} {TASKS.get(member.partition('@')[0]).definition_hash()}" for member in self.members)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


TASKS: Registry[NamedTask] = Registry("task", "mlflow_compress.items.named", group="mlflow_compress.tasks")
