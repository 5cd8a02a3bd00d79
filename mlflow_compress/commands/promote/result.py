"""What became of a registry alias: a promotion, an approval, a rollback, and its history."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from mlflow_compress.commands.shared.tabular import Tabular, lines_of_run
from mlflow_compress.decide.gates import GateNumber
from mlflow_compress.decide.promotion import Decision
from mlflow_compress.reporting.tables import Table
from mlflow_compress.tracking.store import RunLink

if TYPE_CHECKING:
    import pandas as pd

NOTHING_PASSES = 3
"""Exit code of a command that did its work and found that nothing passes."""


@dataclass(frozen=True, kw_only=True)
class Promotion(Tabular):
    """The decision on the variants of one evaluation."""

    decision: Decision  # Every candidate with its reasons, passing ones first
    # The alias has moved, waits for an approval, has stayed where it was, or no candidate passes
    outcome: Literal["promoted", "waiting", "unchanged", "nothing"]
    champion: str | None  # The variant that has the alias now, or would have it after a dry run; None where nobody has
    # Where the winner is registered, and the alias that moves
    registered_model: str
    alias: str
    verdict: str  # What happened to the alias, in one sentence
    # What competed, what could not be compared, and how the winner compares with the champion before it
    remarks: tuple[str, ...]
    # The policy's hash, and its text
    policy_sha256: str
    policy: str
    run: RunLink | None  # The run that holds the decision; None after a dry run

    @property
    def exit_code(self) -> int:
        return NOTHING_PASSES if self.outcome == "nothing" else 0

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per candidate, winners first."""
        columns = self.decision.as_table()
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def numbers(self) -> "pd.DataFrame":
        """Return one row per candidate and gate: what the gate has read, its bound, and whether it passed.

        Columns: `variant`, `gate`, `value`, `read` (the end of the value's interval, or a value that has none),
        `bound`, `at_least` (the bound is the smallest accepted value; otherwise the largest), `passed`.
        """
        import pandas as pd

        rows = [{"variant": o.candidate.name, **asdict(one)} for o in self.decision.outcomes for one in o.numbers]
        return pd.DataFrame(rows, columns=["variant", *(field.name for field in fields(GateNumber))])

    def to_dict(self) -> dict[str, Any]:
        named = ("registered_model", "alias", "outcome", "champion", "verdict", "policy_sha256", "policy")
        return {
            **{name: getattr(self, name) for name in named},
            "remarks": list(self.remarks),
            "candidates": self.to_rows(),
            "run": asdict(self.run) if self.run else None,
        }

    def as_text(self) -> str:
        lines = [self.verdict, *self.remarks, ""]
        for outcome in self.decision.outcomes:
            sign = f"{outcome.rank}." if outcome.rank else " -"
            items = "" if outcome.candidate.items is None else f" ({outcome.candidate.items:,} items)"
            lines.append(
                f"{sign} {outcome.candidate.name}{items}: {outcome.answer.text()}. {'; '.join(outcome.reasons)}"
            )
        return "\n\n".join(["\n".join(lines), *lines_of_run(self.run)])


class _MovedAlias(Tabular):
    """An alias that somebody has moved."""

    run: RunLink

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        return [{name: value for name, value in self.to_dict().items() if name not in ("verdict", "run")}]

    def as_text(self) -> str:
        return "\n\n".join([self.verdict, *lines_of_run(self.run)])


@dataclass(frozen=True, kw_only=True)
class Approval(_MovedAlias):
    """An alias that a reviewer's approval has moved."""

    # What moved, and to whom
    registered_model: str
    alias: str
    variant: str
    version: str
    replaced: str | None  # The version that had it
    by: str  # Who has approved
    reason: str | None  # Why, as it was given
    decision_run_id: str  # The run that has decided
    policy_sha256: str  # By which policy
    receipt_sha256: str | None  # The receipt of the evaluation, where one was exported
    verdict: str  # What happened, in one sentence
    run: RunLink  # The run that holds it


@dataclass(frozen=True, kw_only=True)
class Rollback(_MovedAlias):
    """An alias that went back to the version that had it before."""

    # What moved
    registered_model: str
    alias: str
    # Who has the alias now
    variant: str
    version: str
    replaced: str  # The version that had it
    reason: str | None  # Why, as it was given
    verdict: str  # What happened, in one sentence
    run: RunLink  # The run that holds it


@dataclass(frozen=True, kw_only=True)
class Tenure:
    """The time in which one version had an alias."""

    # Beginning and end in UTC (ISO 8601); until is None for the one that has it now
    since: str
    until: str | None
    # Who had it
    variant: str
    version: str
    by: Literal["promote", "approve", "rollback"]  # What gave it
    run_id: str  # The run that gave it
    policy_sha256: str | None  # The policy that decided; None for a rollback
    verdict: str  # What happened, in one sentence
    reason: str | None  # Why, as it was given to a rollback or an approval
    approved_by: str | None  # Who has approved it
    waiver: str | None  # The waiver that the decision needed
    receipt_sha256: str | None  # The receipt of its evaluation, where one was exported before the decision


@dataclass(frozen=True, kw_only=True)
class AliasHistory(Tabular):
    """Who had an alias when, newest first."""

    # Whose history it is
    registered_model: str
    alias: str
    tenures: tuple[Tenure, ...]  # One per move of the alias
    holder: str | None  # The version that has the alias in the registry now
    remarks: tuple[str, ...]  # What the history does not know

    @property
    def summary(self) -> str:
        times = "once" if len(self.tenures) == 1 else f"{len(self.tenures)} times"
        has = "nobody has it now" if self.holder is None else f"version {self.holder} has it now"
        return f"'{self.alias}' of {self.registered_model} moved {times}; {has}"

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per move, newest first."""
        return [asdict(tenure) for tenure in self.tenures]

    def as_text(self) -> str:
        rows = [
            {"since (UTC)": t.since[:19], "version": t.version, "variant": t.variant, "by": t.by, "run": t.run_id[:8]}
            | {"policy": (t.policy_sha256 or "")[:8], "approved by": t.approved_by or "", "reason": t.reason or ""}
            | {"receipt": (t.receipt_sha256 or "")[:8], "waiver": t.waiver or ""}
            for t in self.tenures
        ]
        table = Table.of(rows).lines(ruled=False)
        return "\n".join([f"{self.summary}.", *self.remarks, *(["", *table] if table else [])])
