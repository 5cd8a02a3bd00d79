"""What may be deleted of a store."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from mlflow_compress.commands.shared.tabular import Tabular
from mlflow_compress.reporting.numbers import bytes_text
from mlflow_compress.reporting.tables import Table

if TYPE_CHECKING:
    from mlflow_compress.tracking.retention import Deletable

_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Retention(Tabular):
    """The runs that nothing needs, the largest first, and why the others stay."""

    runs: "Sequence[Deletable]"
    kept: Mapping[str, int]  # Number of runs that stay, by reason
    deleted: bool  # Whether they were put into MLflow's stage "deleted"; otherwise it was a dry run
    size_bytes: int

    @property
    def summary(self) -> str:
        n = len(self.runs)
        what = f"{n:,} {'run' if n == 1 else 'runs'} with {bytes_text(self.size_bytes)}"
        if self.deleted:
            return f"Deleted: {what}. `mlflow gc` frees the space; until then `mlflow runs restore` brings a run back."
        return f"Can be deleted: {what}. Nothing was changed (--delete true deletes)."

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        return [{**asdict(run), "models": len(run.models)} for run in self.runs]

    def as_text(self) -> str:
        rows = [
            {"run": run.run_id[:8], "stage": run.stage, "name": run.name}
            | {"ended": f"{datetime.fromtimestamp(run.ended / 1000, UTC):%Y-%m-%d}", "size": bytes_text(run.size_bytes)}
            for run in self.runs[:_SHOWN]
        ]
        more = [f"(and {len(self.runs) - _SHOWN:,} smaller ones)"] if len(self.runs) > _SHOWN else []
        kept = [f"Stay, {reason}: {n:,}." for reason, n in sorted(self.kept.items())]
        return "\n".join([self.summary, *Table.of(rows).lines(ruled=False), *more, *kept])
