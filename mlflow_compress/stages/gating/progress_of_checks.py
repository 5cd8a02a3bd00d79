"""What is known of a policy after each block: the values of every check so far, and the verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mlflow_compress.decide.item_checks import VALUES, ItemCheck, ItemPolicy
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.stats.early.sequential_checks import decide_checks
from mlflow_compress.metrics.stats.sequential import Verdict
from mlflow_compress.results import GateRow
from mlflow_compress.stages.gating.item_blocks import Keys, in_order


@dataclass(kw_only=True)
class ChecksSoFar:
    """The checks of a policy, and their values in the order in which items were looked at.

    Attributes
    ----------
    policy : ItemPolicy
    headline : tuple of str
        Families that pooled checks are about.
    error : float
        Level of all verdicts together.
    values : dict
        By check: one value per item that has one.
    decided_at : dict of str to (str, int)
        Verdict of every decided check, with the number of items that the gate had looked at.
    n_items : int
        Items looked at.
    """

    policy: ItemPolicy
    headline: tuple[str, ...]
    error: float
    values: dict[str, list[float]] = field(default_factory=dict)
    decided_at: dict[str, tuple[Verdict, int]] = field(default_factory=dict)
    n_items: int = 0

    def look(self, inputs: MetricInputs, order: Keys) -> None:
        """Take the items of one block, and decide what can be decided."""
        view = inputs.view
        names = list(zip(view.task.tolist(), view.item_id.tolist(), strict=True))
        for check in self.policy.checks:
            rows = check.rows(view, self.headline)
            found = VALUES[check.metric].of(inputs)[rows]
            there = np.isfinite(found)
            items = [names[row] for row in rows[there]]
            self.values.setdefault(check.claim.name, []).extend(in_order(found[there], items, order))
        self.n_items += len(order)
        claims = [check.claim for check in self.policy.checks]
        for name, verdict in decide_checks(claims, self.values, error=self.error).items():
            if verdict != "undecided":
                self.decided_at.setdefault(name, (verdict, self.n_items))

    def of_gate(self, gate: int) -> Verdict:
        """Return what the items say of one gate: it passes when all of its checks do, and fails when one does."""
        found = [self.decided_at.get(c.claim.name, ("undecided", 0))[0] for c in self.policy.checks if c.gate == gate]
        if "fail" in found:
            return "fail"
        return "pass" if found and all(verdict == "pass" for verdict in found) else "undecided"

    def rows(self) -> list[GateRow]:
        """Return one row per check: the value so far, and when it was decided."""
        return [self._row(check) for check in self.policy.checks]

    def _row(self, check: ItemCheck) -> GateRow:
        claim = check.claim
        values = np.array(self.values.get(claim.name, []))
        decided = self.decided_at.get(claim.name)
        value = VALUES[check.metric].factor * float(values.mean()) if len(values) else None
        return GateRow(
            gate=check.gate + 1,
            name=claim.name.rpartition(" (gate")[0],
            verdict="undecided" if decided is None else decided[0],
            decided_after=None if decided is None else decided[1],
            by="items",
            value=value,
            limit=VALUES[check.metric].factor * claim.limit,
            n=len(values),
            reason="",
        )


def needed_items(checks: Sequence[ItemCheck], inputs: MetricInputs, headline: Sequence[str]) -> list[tuple[str, str]]:
    """Return the items that some check is about and that the baseline has answered, by task and id."""
    view = inputs.view
    rows = {int(row) for check in checks for row in check.rows(view, headline)}
    answered = inputs.baseline_predictions.scored[:, 0]
    return [(str(view.task[row]), str(view.item_id[row])) for row in sorted(rows) if answered[row]]
