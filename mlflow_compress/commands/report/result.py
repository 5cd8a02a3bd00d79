"""The variants of one evaluation side by side, and the file that shows them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlflow_compress.commands.shared.tabular import ScoredVariants
from mlflow_compress.decide.promotion import Decision
from mlflow_compress.decide.scoreboard import Scoreboard, ScoreRow


@dataclass(frozen=True, kw_only=True)
class VariantsReport(ScoredVariants):
    """What `report` wrote."""

    board: Scoreboard  # The variants side by side, and which of them can be told apart
    decision: Decision  # What the default gates say; nothing was promoted
    choice: str  # What the policy chooses, and why
    path: Path  # The file

    def __getitem__(self, name: str) -> ScoreRow:
        """Return the row of a variant."""
        return {row.name: row for row in self.board.rows}[name]

    @property
    def summary(self) -> str:
        """What was found, in one sentence."""
        from mlflow_compress.reporting.scoreboard_text import finding

        return f"{finding(self.board)}."

    @property
    def scores(self) -> Scoreboard:
        """The scoreboard."""
        return self.board

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        return {"path": str(self.path), "scoreboard": self.board.to_dict(), "decision": asdict(self.decision)}

    def as_text(self) -> str:
        """Return the scoreboard, what the policy chooses, and where the page lies."""
        from mlflow_compress.reporting.scoreboard_text import scoreboard_text, wrapped

        chosen = [*wrapped(self.choice), f"Report: {self.path}"]
        return "\n\n".join(["\n".join(wrapped(self.summary)), scoreboard_text(self.board), "\n".join(chosen)])
