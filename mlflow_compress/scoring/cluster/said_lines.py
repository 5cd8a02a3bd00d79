"""Lines that workers say while they compute, on their way to the process that hands out tasks."""

from __future__ import annotations

from types import ModuleType
from typing import Any

_SECONDS = 5.0


class LineKeeper:
    """Keeps what was said until it is read: an actor of its own, because a worker that computes answers nobody."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, str]] = []

    def say(self, number: int, line: str) -> None:
        """Keep a line about the task of this number."""
        self._lines.append((number, line))

    def take(self) -> list[tuple[int, str]]:
        """Return what was said since the last call."""
        taken, self._lines = self._lines, []
        return taken


class SaidLines:
    """What workers say about their tasks. The keeper ends when nobody refers to it any more.

    Attributes
    ----------
    keeper : actor handle
        For the arguments of tasks: a worker calls ``keeper.say.remote(number, line)``, which does not wait.
    """

    def __init__(self, ray: ModuleType) -> None:
        self._ray = ray
        self.keeper: Any = ray.remote(LineKeeper).options(num_cpus=0, max_restarts=-1).remote()

    def take(self) -> list[tuple[int, str]]:
        """Return the number of the task and the line of everything that is new; nothing while the keeper is away."""
        try:
            taken: list[tuple[int, str]] = self._ray.get(self.keeper.take.remote(), timeout=_SECONDS)
        except self._ray.exceptions.RayError:
            return []
        return taken
