"""One variant from compression to verdict."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mlflow_compress.commands.evaluate.result import Measurement
from mlflow_compress.commands.shared.tabular import lines_of_run
from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest
from mlflow_compress.metrics.core.account import Account


@dataclass(frozen=True, kw_only=True)
class VariantRun(Measurement):
    """Everything that the stages of one variant found: what its main run shows."""

    baseline: str  # The baseline's short name
    model: str  # The baseline as it was named
    verdict: str  # What was found, in one sentence
    manifest: CheckpointManifest | None  # How the checkpoint was made, and what it weighs; None of a served model
    checkpoint: str  # Its folder, or where it is served
    gates: Mapping[str, float]  # The upper ends of intervals that a promotion reads
    account: Account  # What was asked, and what became of it
    failed: Mapping[str, str] = field(default_factory=dict)  # Error message of every stage that failed

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the records as plain values, ready for JSON."""
        return {
            **super().to_dict(),
            "baseline": self.baseline,
            "verdict": self.verdict,
            "checkpoint": self.checkpoint,
            "manifest": None if self.manifest is None else asdict(self.manifest),
            "account": self.account.to_dict(),
            "gates": dict(self.gates),
            "failed": dict(self.failed),
        }

    def as_text(self) -> str:
        """Return the verdict, the headline table, where to look, and the next command."""
        from mlflow_compress.reporting.headline import for_users, headline_table
        from mlflow_compress.reporting.scoreboard_text import wrapped

        table = headline_table(self.pooled, self.manifest, failed_stages=self.failed)
        after = f"Next:          mlflow-compress promote --model {shlex.quote(self.model)}"
        sentences = filter(None, (self.verdict, for_users(self.pooled), self.account.sentence))
        said = ["\n".join(wrapped(text)) for text in sentences]
        return "\n\n".join([*said, table, *lines_of_run(self.run), *([] if self.failed else [after])])
