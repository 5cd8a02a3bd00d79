"""What was decided on every candidate, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlflow_compress.decide.promotion import Decision
from mlflow_compress.results.tabular import Tabular
from mlflow_compress.tracking.store import RunLink


@dataclass(frozen=True, kw_only=True)
class Promotion(Tabular):
    """The decision on the variants of one evaluation.

    Attributes
    ----------
    decision : Decision
        The winner, if any, and every candidate with its reasons.
    registered_model, alias : str
        Where the versions are registered, and the alias that moves.
    verdict : str
        What happened to the alias, in one sentence.
    remarks : tuple of str
        What competed, what could not be compared, and names that several checkpoints share.
    run : RunLink
        The run that holds the decision.
    """

    decision: Decision
    registered_model: str
    alias: str
    verdict: str
    remarks: tuple[str, ...]
    run: RunLink

    @property
    def champion(self) -> str | None:
        """The winner's name; None where no candidate passes every gate."""
        return self.decision.champion.name if self.decision.champion else None

    @property
    def summary(self) -> str:
        """What happened to the alias."""
        return self.verdict

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per candidate, winners first."""
        columns = self.decision.as_table()
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as plain values, ready for JSON."""
        return {
            "registered_model": self.registered_model,
            "alias": self.alias,
            "champion": self.champion,
            "verdict": self.verdict,
            "remarks": list(self.remarks),
            "candidates": self.to_rows(),
            "run": asdict(self.run),
        }
