"""What is known of a policy after each block: the values of every check so far, and the verdicts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mlflow_compress import files as atomic
from mlflow_compress.commands.evaluate.outputs import ModelOutputs, run_model
from mlflow_compress.commands.gate.result import GateRow
from mlflow_compress.decide.item_checks import VALUES, ItemCheck, ItemPolicy
from mlflow_compress.engines.interface import ModelScorer
from mlflow_compress.files import read_json_object
from mlflow_compress.items.suite import Suite
from mlflow_compress.metrics.core.item_table import row_keys
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.stats.sequential import Verdict, decide_checks
from mlflow_compress.records import RunRecords

Keys = Sequence[tuple[str, str]]
"""Items by task and id."""

_DONE = "done.json"  # in the folder of a block whose records are complete


def joined(keys: Keys) -> pa.Array:
    """Return one string per item, as `row_keys` gives it for a record."""
    from mlflow_compress.records import Items

    empty = {name: [None] * len(keys) for name in Items.SCHEMA.names}
    return row_keys(Items.from_columns({**empty, "task": [t for t, _ in keys], "item_id": [i for _, i in keys]}))


def restricted(records: RunRecords, keys: pa.Array) -> RunRecords:
    """Return the records of some items alone, in the original order of their options."""
    kept = {}
    for column in fields(records):
        table = getattr(records, column.name)
        if column.name not in ("items", "option_scores", "option_distances", "generations") or table is None:
            continue
        found = type(table)(table.table.filter(pc.is_in(row_keys(table), value_set=keys)))
        if column.name.startswith("option"):
            found = found.where(permutation=0)
        kept[column.name] = found if len(found) else None
    return RunRecords(**kept)


def joined_records(parts: Sequence[RunRecords]) -> RunRecords:
    """Return the records of several blocks together."""
    whole = {}
    for column in fields(RunRecords):
        tables = [table for part in parts if (table := getattr(part, column.name)) is not None]
        whole[column.name] = type(tables[0]).concat(tables) if tables else None
    return RunRecords(**whole)


@dataclass(frozen=True, kw_only=True)
class BlockScorer:
    """Scores blocks of items, each of them once."""

    suite: Suite  # All tasks
    # Loads the model when the first block must be scored; it stays loaded
    scorer: Callable[[], ModelScorer]
    states: Any  # What the variant is compared with: see `EngineModel.comparable_with`
    folder: Path  # Folder of finished blocks, which a gate that was interrupted finds again

    def records(self, number: int, keys: Keys) -> tuple[RunRecords, int]:
        """Return the variant's records of one block, and the number of prompts that were too long."""
        folder = self.folder / f"block-{number:05d}"
        done = folder / _DONE
        if done.is_file():
            known = read_json_object(done)
            if known.get("items") == [list(key) for key in keys] and isinstance(known.get("truncated"), int):
                return RunRecords.read(folder), known["truncated"]
        outputs = self._score(keys, folder / "unfinished")
        outputs.records.write(folder)
        # Last, so that an interrupted block is scored again.
        atomic.write(done, json.dumps({"items": [*map(list, keys)], "truncated": outputs.n_truncated}).encode())
        return outputs.records, outputs.n_truncated

    def _score(self, keys: Keys, resume: Path) -> ModelOutputs:
        return run_model(self.scorer(), part_of(self.suite, keys), baseline=self.states, resume=resume)


def part_of(suite: Suite, keys: Keys) -> Suite:
    """Return some items of a suite, in the original order of their options, without corpora and documents."""
    wanted = set(keys)
    tasks = []
    for task in suite.tasks:
        ids = {item_id for name, item_id in wanted if name == task.name}
        if ids:
            requests = tuple(r for r in task.requests if r.permutation == 0 and r.item_id in ids)
            tasks.append(replace(task, items=task.items.where(item_id=ids), requests=requests, documents=()))
    return replace(suite, tasks=tuple(tasks), corpora=(), averages=())


def blocks(order: Keys, size: int) -> Iterator[tuple[int, Keys]]:
    """Iterate over the blocks of an order, numbered; the last one may be smaller."""
    for number, start in enumerate(range(0, len(order), size)):
        yield number, order[start : start + size]


def in_order(values: np.ndarray[tuple[int], np.dtype[np.float64]], found: Keys, order: Keys) -> list[float]:
    """Return one value per item of `order`; `found` names the items of the values."""
    by_key = dict(zip(found, values.tolist(), strict=True))
    return [by_key[key] for key in order if key in by_key]


@dataclass(kw_only=True)
class ChecksSoFar:
    """The checks of a policy, and their values in the order in which items were looked at."""

    policy: ItemPolicy
    headline: tuple[str, ...]  # Families that pooled checks are about
    error: float  # Level of all verdicts together
    values: dict[str, list[float]] = field(default_factory=dict)  # By check: one value per item that has one
    # Verdict of every decided check, with the number of items that the gate had looked at
    decided_at: dict[str, tuple[Verdict, int]] = field(default_factory=dict)
    n_items: int = 0  # Items looked at

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
