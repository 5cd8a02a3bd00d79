"""Two evaluations, compared from what they left on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlflow_compress.commands.shared.tabular import Tabular


@dataclass(frozen=True)
class Comparison(Tabular):
    """How the answers of two models differ: accuracy, flips, McNemar's test, pooled and by task.

    Attributes
    ----------
    found : mapping
        As `metrics.core.answer_comparison.compare_answers` describes it.
    """

    found: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Return one number: "flips_pct", "accuracy_delta", "mcnemar_p"."""
        return self.found[name]

    @property
    def summary(self) -> str:
        """Accuracy and flips, in one sentence."""
        found = self.found
        accuracies = f"{100 * found['accuracy_baseline']:.2f} % -> {100 * found['accuracy_variant']:.2f} %"
        flips = f"{found['flips_pct']:.2f} % of {found['n']} answers flipped"
        return f"{flips}; accuracy {accuracies} (McNemar p = {found['mcnemar_p']:.4g})"

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row for all items, whose task is None, and one per task."""
        tasks = self.found.get("tasks", {})
        whole = {name: value for name, value in self.found.items() if name != "tasks"}
        every = list(dict.fromkeys([*whole, *(name for task in tasks.values() for name in task)]))
        parts = [(None, whole), *tasks.items()]
        return [{"task": task, **{name: values.get(name) for name in every}} for task, values in parts]

    def to_dict(self) -> dict[str, Any]:
        """Return every number as plain values, ready for JSON."""
        return dict(self.found)
