"""What `resume` has done again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mlflow_compress.commands.shared.tabular import Tabular


@dataclass(frozen=True, kw_only=True)
class ResumedCommand:
    """A command that was killed, or cut off from the tracking server."""

    command: str  # Its verb, and the parameters that are not at their defaults
    state: Literal["unfinished", "finished", "failed"]  # "unfinished": only listed, or broke off again
    outcome: str  # What it found, or why it failed


@dataclass(frozen=True, kw_only=True)
class Resumed(Tabular):
    """The commands that had not ended, the oldest first."""

    commands: tuple[ResumedCommand, ...]  # One per command

    @property
    def exit_code(self) -> int:
        """1 where a command failed or broke off again, otherwise 0."""
        return int(any(one.state == "failed" or (one.state == "unfinished" and one.outcome) for one in self.commands))

    @property
    def summary(self) -> str:
        """How many commands there were, and what became of them."""
        if not self.commands:
            return "Nothing is left to do: every command of this machine has ended"
        states = [one.state for one in self.commands]
        counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        return f"{len(states)} {'command' if len(states) == 1 else 'commands'}: {counted}"

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per command."""
        return [asdict(one) for one in self.commands]

    def as_text(self) -> str:
        """Return the commands that had not ended, and what became of each."""
        lines = [f"{one.state}: {one.command}" + (f"\n  {one.outcome}" if one.outcome else "") for one in self.commands]
        return "\n".join([*lines, f"{self.summary}."])
