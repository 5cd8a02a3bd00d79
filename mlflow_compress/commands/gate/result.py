"""The verdict of a gate, and what it saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mlflow_compress.commands.promote.result import NOTHING_PASSES
from mlflow_compress.commands.shared.tabular import Tabular, lines_of_run
from mlflow_compress.tracking.store import RunLink


@dataclass(frozen=True, kw_only=True)
class GateRow:
    """One check of a gate, or a gate that was decided as a whole."""

    gate: int  # Number of the policy's gate; a gate on KL has two checks
    name: str  # The claim: "distance/flips_pct <= 5"
    verdict: Literal["pass", "fail", "undecided"]
    decided_after: int | None = None  # Items that the gate had looked at; None where items did not decide
    # What decided: the items so far, the fixed-n rule after all of them, the checkpoint's size, or a timing of it
    by: Literal["items", "all items", "checkpoint", "timing"]
    value: float | None = None  # The value so far, in the metric's unit; None where no item has one
    limit: float | None = None  # The limit
    n: int = 0  # Items that have a value
    reason: str = ""  # What a promotion says of the gate, where all items or the checkpoint decided


@dataclass(frozen=True, kw_only=True)
class GateVerdict(Tabular):
    """Whether a checkpoint is near enough to its baseline, and how many items that took."""

    passed: bool  # Whether every gate passes
    verdict: str  # The same, in one sentence
    rows: tuple[GateRow, ...]  # What decided
    # Items that were looked at, and those that the whole evaluation has
    items_used: int
    items_available: int
    error: float  # Probability that any early verdict is wrong, at most
    seed: int  # Of the random order
    # The policy's hash, and its text
    policy_sha256: str
    policy: str
    # Names of the two models
    variant: str
    baseline: str
    baseline_run_id: str  # The run that holds the baseline's records
    remarks: tuple[str, ...]  # What else there is to say
    run: RunLink  # The run that holds the verdict

    @property
    def exit_code(self) -> int:
        """What the command exits with: 0 if every gate passes, otherwise 3."""
        return 0 if self.passed else NOTHING_PASSES

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per check."""
        return [asdict(row) for row in self.rows]

    def as_text(self) -> str:
        """Return the verdict, one line per check, and what else there is to say."""
        lines = [self.verdict, *self.remarks, ""]
        for row in self.rows:
            after = "" if row.decided_after is None else f", after {row.decided_after} items"
            value = "" if row.value is None else f": {row.value:.4g} on {row.n} items"
            lines.append(f"{row.gate}. {row.verdict}: {row.reason or row.name}{value}{after}")
        return "\n\n".join(["\n".join(lines), *lines_of_run(self.run)])
