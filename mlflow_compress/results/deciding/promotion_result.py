"""What was decided on every candidate, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mlflow_compress.decide.promotion import Decision
from mlflow_compress.results.tabular import Tabular
from mlflow_compress.tracking.store import RunLink

NOTHING_PASSES = 3
"""Exit code of a command that did its work and found that nothing passes."""


@dataclass(frozen=True, kw_only=True)
class Promotion(Tabular):
    """The decision on the variants of one evaluation.

    Attributes
    ----------
    decision : Decision
        Every candidate with its reasons, passing ones first.
    outcome : {"promoted", "unchanged", "nothing"}
        The alias has moved, has stayed where it was, or no candidate passes.
    champion : str or None
        The variant that has the alias now, or would have it after a dry run; None where nobody has.
    registered_model, alias : str
        Where the winner is registered, and the alias that moves.
    verdict : str
        What happened to the alias, in one sentence.
    remarks : tuple of str
        What competed, what could not be compared, and how the winner compares with the champion before it.
    policy_sha256, policy : str
        The policy's hash, and its text.
    run : RunLink or None
        The run that holds the decision; None after a dry run.
    """

    decision: Decision
    outcome: Literal["promoted", "unchanged", "nothing"]
    champion: str | None
    registered_model: str
    alias: str
    verdict: str
    remarks: tuple[str, ...]
    policy_sha256: str
    policy: str
    run: RunLink | None

    @property
    def exit_code(self) -> int:
        """What the command exits with: 3 where no candidate passes, otherwise 0."""
        return NOTHING_PASSES if self.outcome == "nothing" else 0

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
        named = ("registered_model", "alias", "outcome", "champion", "verdict", "policy_sha256", "policy")
        return {
            **{name: getattr(self, name) for name in named},
            "remarks": list(self.remarks),
            "candidates": self.to_rows(),
            "run": asdict(self.run) if self.run else None,
        }
