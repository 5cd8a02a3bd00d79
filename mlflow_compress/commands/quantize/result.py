"""A compressed checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow_compress.commands.shared.tabular import Tabular, lines_of_run
from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest
from mlflow_compress.tracking.store import RunLink


@dataclass(frozen=True, kw_only=True)
class CompressedModel(Tabular):
    """A compressed checkpoint that was loaded again in a fresh process and computes what it should."""

    folder: Path  # The checkpoint: transformers, and engines that know its format, load it
    manifest: CheckpointManifest  # How it was made, and what it weighs
    run: RunLink  # The run that holds it
    warning: str | None = None  # What the checkpoint must not be used for

    def __fspath__(self) -> str:
        """Return the folder: a result is given where a checkpoint is asked for."""
        return str(self.folder)

    @property
    def name(self) -> str:
        """The variant's short name: "awq-4bit-g128"."""
        return self.manifest.label

    @property
    def summary(self) -> str:
        """Size and cost, in plain words."""
        made = self.manifest
        zeros, before = 100 * (made.sparsity or 0.0), 100 * (made.base_sparsity or 0.0)
        pruned = f", {zeros:.1f} % of them zero ({before:.1f} % in the baseline)" if zeros - before >= 0.05 else ""
        alone = ". Only this package reads its format: no server does" if made.served_by == [] else ""
        warning = f". {self.warning}" if self.warning else ""
        return (
            f"{self.name}: {made.size_ratio:.2f}x smaller, {made.bits_per_weight:.2f} bits per linear weight{pruned} "
            f"({made.bits_per_weight_model:.2f} over the whole model), made in {made.seconds:.0f} s{alone}{warning}"
        )

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row: the sizes and the cost."""
        kept = ("method", "format", "size_ratio", "size_bytes", "bits_per_weight", "bits_per_weight_model", "seconds")
        return [{"name": self.name, **{field: getattr(self.manifest, field) for field in kept}}]

    def as_text(self) -> str:
        """Return size and cost, and where the checkpoint lies."""
        return "\n".join([self.summary, f"Checkpoint: {self.folder}", *lines_of_run(self.run)])
