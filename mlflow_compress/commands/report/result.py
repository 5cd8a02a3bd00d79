"""The variants of one evaluation side by side, and the file that shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlflow_compress.commands.shared.tabular import Tabular
from mlflow_compress.decide.promotion import Decision
from mlflow_compress.decide.scoreboard import Scoreboard, ScoreRow
from mlflow_compress.reporting.tables import Table


@dataclass(frozen=True, kw_only=True)
class VariantsReport(Tabular):
    """What `report` wrote."""

    board: Scoreboard  # The variants side by side, and which of them can be told apart
    decision: Decision  # What the default gates say; nothing was promoted
    path: Path  # The file

    def __getitem__(self, name: str) -> ScoreRow:
        """Return the row of a variant."""
        return {row.name: row for row in self.board.rows}[name]

    @property
    def summary(self) -> str:
        """What was found, in one sentence."""
        from mlflow_compress.reporting.scoreboard_text import finding

        return f"{finding(self.board)}."

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per variant: its value in every column, None where it has none."""
        return [
            {
                "variant": row.name,
                "method": row.method,
                "status": row.status,
                "on_front": row.on_front,
                **{c.key: row.cells[c.key].value if c.key in row.cells else None for c in self.board.columns},
            }
            for row in self.board.rows
        ]

    def table(self) -> Table:
        """Return the scoreboard."""
        from mlflow_compress.reporting.scoreboard_text import scoreboard_table

        return scoreboard_table(self.board)

    def frame_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return the scoreboard's numbers under their labels, with the ends of their intervals."""
        from mlflow_compress.reporting.scoreboard_text import scoreboard_frame

        return scoreboard_frame(self.board)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        return {"path": str(self.path), "scoreboard": self.board.to_dict(), "decision": asdict(self.decision)}

    def as_text(self) -> str:
        """Return the scoreboard, and where the page lies."""
        from mlflow_compress.reporting.scoreboard_text import scoreboard_text

        return "\n".join([self.summary, "", scoreboard_text(self.board), "", f"Report: {self.path}"])
