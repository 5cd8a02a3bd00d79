"""Two evaluations, compared from what they left on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlflow_compress.commands.shared.tabular import Tabular
from mlflow_compress.metrics.stats.clusters import FEWEST_GROUPS


@dataclass(frozen=True)
class Comparison(Tabular):
    """How the answers of two models differ: accuracy, flips, McNemar's test, pooled and by task."""

    found: Mapping[str, Any]  # As `compare_answers` describes it

    def __getitem__(self, name: str) -> Any:
        """Return one number: "flips_pct", "accuracy_delta", "mcnemar_p"."""
        return self.found[name]

    @property
    def summary(self) -> str:
        """Accuracy and flips, in one sentence."""
        found = self.found
        accuracies = f"{100 * found['accuracy_baseline']:.2f} % -> {100 * found['accuracy_variant']:.2f} %"
        flips = f"{found['flips_pct']:.2f} % of {found['n']} answers flipped"
        more = f"; {found['n_unscored']} more items have no answer" if found["n_unscored"] else ""
        return f"{flips}; accuracy {accuracies} (McNemar p = {found['mcnemar_p']:.4g}){more}"

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

    def as_text(self) -> str:
        """Return accuracy of both, the difference, flips, and McNemar's test."""
        found = self.found
        points, flips = found["accuracy_delta_interval"], found["flips_pct_interval"]
        change = "" if points is None else f" [{100 * points[0]:+.2f}, {100 * points[1]:+.2f}]"
        shares = "" if flips is None else f" [{flips[0]:.2f}, {flips[1]:.2f}]"
        grouped = found["n_groups"] < found["n"]
        w2w = "" if found["w2w"] is None else f", wrong to another wrong {found['w2w']}"
        accuracies = f"{100 * found['accuracy_baseline']:.2f} % -> {100 * found['accuracy_variant']:.2f} %"
        lines = [
            f"items      {found['n']}"
            + (f" in {found['n_groups']} groups" if grouped else "")
            + (f" ({found['n_unscored']} more without an answer)" if found["n_unscored"] else ""),
            f"accuracy   {accuracies}, difference {100 * found['accuracy_delta']:+.2f} points{change}",
            f"flips      {found['flips_pct']:.2f} %{shares}: "
            f"right to wrong {found['c2w']}, wrong to right {found['w2c']}{w2w}",
            f"McNemar    p = {found['mcnemar_p']:.4g}",
        ]
        if found["all_flips_pct"] is not None:
            lines.insert(3, f"all flips  {found['all_flips_pct']:.2f} %")
        if points is None:
            lines.append(f"intervals  none: items of fewer than {FEWEST_GROUPS} groups have no valid one")
        if found.get("rule"):
            lines.append(f"scored by  {found['rule']}")
        return "\n".join(lines)
