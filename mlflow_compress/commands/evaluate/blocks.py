"""Scores a model on blocks of items, each of them once; an interrupted command finds the finished blocks again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mlflow_compress import files as atomic
from mlflow_compress.commands.evaluate.outputs import ModelOutputs, run_model
from mlflow_compress.decide.item_sampling import ItemSampler
from mlflow_compress.engines.interface import ModelScorer
from mlflow_compress.files import read_json_object
from mlflow_compress.items.suite import Suite
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.records import ItemKey, RunRecords
from mlflow_compress.scoring.plan.encoding import Shortened

Keys = Sequence[ItemKey]

_DONE = "done.json"  # in the folder of a block whose records are complete


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
    folder: Path  # Folder of finished blocks, which a command that was interrupted finds again
    every_order: bool = False  # Score the shuffled orders of the options too

    def records(self, number: int, keys: Keys) -> tuple[RunRecords, Shortened]:
        """Return the variant's records of one block, and the items that it could not read whole."""
        folder = self.folder / f"block-{number:05d}"
        done = folder / _DONE
        if done.is_file():
            known = read_json_object(done)
            if known.get("items") == [list(key) for key in keys]:
                cut, too_long = (frozenset(map(tuple, known[name])) for name in ("cut", "too_long"))
                return RunRecords.read(folder), Shortened(cut, too_long)
        outputs = self._score(keys, folder / "unfinished")
        outputs.records.write(folder)
        short = {"cut": sorted(outputs.shortened.cut), "too_long": sorted(outputs.shortened.too_long)}
        # Last, so that an interrupted block is scored again.
        atomic.write(done, json.dumps({"items": [*map(list, keys)], **short}).encode())
        return outputs.records, outputs.shortened

    def _score(self, keys: Keys, resume: Path) -> ModelOutputs:
        return run_model(
            self.scorer(), part_of(self.suite, keys, every_order=self.every_order), baseline=self.states, resume=resume
        )


def run_sampled(
    blocks: BlockScorer, sampler: ItemSampler, inputs: Callable[[RunRecords], MetricInputs]
) -> ModelOutputs:
    """Score a model on drawn items, round after round until they are enough, and on all running text.

    `inputs` returns what metrics read of the variant's records so far.
    """
    tasks = (
        replace(task, items=task.items.where(item_id=[]), requests=(), answering=None)
        for task in blocks.suite.tasks
        if task.documents
    )
    texts = replace(blocks.suite, tasks=tuple(tasks), averages=())
    parts, short, seen = [], Shortened(), set()
    while True:
        keys = [key for key in sampler.keys if key not in seen]
        records, shortened = blocks.records(sampler.rounds, keys)
        parts.append(records)
        seen |= set(keys)
        short = Shortened(short.cut | shortened.cut, short.too_long | shortened.too_long)
        found = replace(joined_records(parts), draws=sampler.draws())
        if not sampler.go_on(inputs(found)):
            break
    if texts.corpora or texts.tasks:
        text = run_model(
            blocks.scorer(), texts, baseline=blocks.states, generations=False, resume=blocks.folder / "text"
        )
        found = text.records.with_records(found)
        short = Shortened(short.cut | text.shortened.cut, short.too_long | text.shortened.too_long)
    return ModelOutputs(found, len(short.cut), short)


def part_of(suite: Suite, keys: Keys, *, every_order: bool = False) -> Suite:
    """Return some items of a suite, without corpora and documents, and unless asked for without shuffled options."""
    wanted = set(keys)
    tasks = []
    for task in suite.tasks:
        ids = {item_id for name, item_id in wanted if name == task.name}
        if ids:
            requests = tuple(r for r in task.requests if r.item_id in ids and (every_order or r.permutation == 0))
            tasks.append(replace(task, items=task.items.where(item_id=ids), requests=requests, documents=()))
    return replace(suite, tasks=tuple(tasks), corpora=(), averages=())
