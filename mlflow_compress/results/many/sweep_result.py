"""What a sweep has found, and what it is doing at this moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mlflow_compress.decide.scoreboard import Scoreboard
from mlflow_compress.results.many.sweep_plan import SweepPlan
from mlflow_compress.results.tabular import Tabular
from mlflow_compress.tracking.store import RunLink

State = Literal["waits", "runs", "finished", "found", "failed"]


@dataclass(frozen=True, kw_only=True)
class VariantProgress:
    """How far one variant of a running sweep is.

    Attributes
    ----------
    name : str
        The variant.
    state : {"waits", "runs", "finished", "found", "failed"}
        "found" means that an earlier run holds it.
    doing : str
        What happens now, what was found, or why it failed.
    """

    name: str
    state: State = "waits"
    doing: str = ""


@dataclass(frozen=True, kw_only=True)
class SweepProgress:
    """What has just happened in a sweep: a line for a log, and all variants for a live table."""

    line: str
    variants: tuple[VariantProgress, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sweep(Tabular):
    """Many variants of one baseline, side by side.

    Attributes
    ----------
    scoreboard : Scoreboard
        Every variant with its values, and which of them can be told apart.
    plan : SweepPlan
        What was asked for.
    found : str
        What was found, in one sentence.
    text : str
        The scoreboard as text for a terminal.
    run : RunLink
        The run that holds it.
    """

    scoreboard: Scoreboard
    plan: SweepPlan
    found: str
    text: str
    run: RunLink

    @property
    def failed(self) -> dict[str, str]:
        """Every variant that failed or lacks a stage, and why."""
        return {row.name: row.reason for row in self.scoreboard.rows if row.reason and row.status != "unsupported"}

    @property
    def summary(self) -> str:
        """What was found."""
        return self.found

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per variant, with a value for each column of the scoreboard; None where it is missing."""
        return [
            {
                "variant": row.name,
                "status": row.status,
                **{c.key: row.cells[c.key].value if c.key in row.cells else None for c in self.scoreboard.columns},
                "run_id": row.run_id,
            }
            for row in self.scoreboard.rows
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return scoreboard and plan as plain values, ready for JSON."""
        return {"scoreboard": self.scoreboard.to_dict(), "plan": self.plan.to_dict(), "run": asdict(self.run)}
