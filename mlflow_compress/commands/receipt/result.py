"""A receipt: what was measured under which conditions, and what vouches for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow_compress.commands.shared.tabular import Tabular


@dataclass(frozen=True, kw_only=True)
class Receipt(Tabular):
    """What a receipt states, and how it was signed and checked."""

    path: Path
    sha256: str  # Of the file
    statement: Mapping[str, Any]  # The in-toto statement
    signed_by: str | None  # SHA-256 of the public key; None of an unsigned receipt
    with_records: bool
    recomputed: int | None = None  # Number of figures that were computed again; None where that was not asked for

    @property
    def stated(self) -> Any:
        """The predicate of the statement: evaluation, environment, policy, gates, verdict and figures."""
        return self.statement["predicate"]

    @property
    def summary(self) -> str:
        """The verdict of the evaluation, and what the policy says."""
        gates = self.stated["gates"]
        return f"{self.stated['verdict']} The policy's gates are {'kept' if gates['passed'] else 'not kept'}."

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per figure."""
        return self.stated["figures"]  # type: ignore[no-any-return]

    def as_text(self) -> str:
        """Return the summary, each gate, and what vouches for it."""
        digests = "" if self.with_records else " (their digests alone)"
        vouched = "Unsigned: it shows damage, but anybody can have written it."
        lines = [
            self.summary,
            *(f"  {reason}" for reason in self.stated["gates"]["reasons"]),
            f"Evaluation {self.stated['evaluation_id']}, {len(self.to_rows())} figures.",
            f"Receipt {self.path}, SHA-256 {self.sha256}.",
            f"{len(self.statement['subject'])} files of records{digests}.",
            vouched if self.signed_by is None else f"Signed with the key {self.signed_by}.",
        ]
        again = [] if self.recomputed is None else [f"{self.recomputed} figures were recomputed and are equal."]
        return "\n".join([*lines, *again])
