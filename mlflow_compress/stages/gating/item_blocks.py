"""The items of a gate in random order, cut into blocks, and the records of a block: scored, or found on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mlflow_compress import atomic
from mlflow_compress.files.json_text import read_json_object
from mlflow_compress.items.suite import Suite
from mlflow_compress.metrics.core.item_table import row_keys
from mlflow_compress.records import RunRecords
from mlflow_compress.scoring.baseline_store.state_store import StateStore
from mlflow_compress.scoring.endpoint.endpoint_scorer import EndpointScorer
from mlflow_compress.scoring.endpoint.top_lists import TopLists
from mlflow_compress.scoring.engine import Scorer
from mlflow_compress.stages.evaluation.run_model import ModelOutputs, run_model

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
    for field in fields(records):
        table = getattr(records, field.name)
        if field.name not in ("items", "option_scores", "option_distances", "generations") or table is None:
            continue
        found = type(table)(table.table.filter(pc.is_in(row_keys(table), value_set=keys)))
        if field.name.startswith("option"):
            found = found.where(permutation=0)
        kept[field.name] = found if len(found) else None
    return RunRecords(**kept)


def joined_records(parts: Sequence[RunRecords]) -> RunRecords:
    """Return the records of several blocks together."""
    whole = {}
    for field in fields(RunRecords):
        tables = [table for part in parts if (table := getattr(part, field.name)) is not None]
        whole[field.name] = type(tables[0]).concat(tables) if tables else None
    return RunRecords(**whole)


@dataclass(frozen=True, kw_only=True)
class BlockScorer:
    """Scores blocks of items, each of them once.

    Attributes
    ----------
    suite : Suite
        All tasks.
    scorer : callable () -> Scorer or EndpointScorer
        Loads the model when the first block must be scored; it stays loaded.
    states : StateStore, TopLists or None
        The baseline's states; for a served variant, its most probable tokens.
    folder : Path
        Folder of finished blocks, which a gate that was interrupted finds again.
    """

    suite: Suite
    scorer: Callable[[], Scorer | EndpointScorer]
    states: StateStore | TopLists | None
    folder: Path

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
