"""What the scoreboard reads of a variant: its results, its size, its cost, and what it scored on each item."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mlflow_compress.decide.gates import DECODE_SPEEDUP, DELTA, FLIPS, KL, MEMORY_RATIO, PREFILL_SPEEDUP, RATIO, SIZE
from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import Direction, headline_keys, key
from mlflow_compress.metrics.core.metric_registry import MetricKey as Declared
from mlflow_compress.metrics.core.requirements import PREDICTIONS, VARIANT
from mlflow_compress.metrics.stats.arrays import Float, Objects, same_length
from mlflow_compress.records import MetricResult

Status = Literal["finished", "failed", "unsupported"]
NO_SPEED_STAGE = "the speed stage was not run"
"""Why a variant has no speed where none was asked for."""


@dataclass(frozen=True, eq=False)
class ItemScores:
    """What one variant scored on each item of the headline values. Row `i` of every array is item `i`."""

    task: Objects  # Together they identify an item; shape (n,)
    item_id: Objects
    # 1 where the variant is right, 0 where it is wrong, NaN where variant or baseline has no answer; shape (n,)
    correct: Float
    kl: Float  # Divergence from the baseline in nats, NaN where the item has none; shape (n,)

    def __post_init__(self) -> None:
        same_length(task=self.task, item_id=self.item_id, correct=self.correct, kl=self.kl)

    def in_order_of(self, other: ItemScores) -> ItemScores:
        """Return the same scores, with the items in the order of `other`.

        Raises `AlignmentError`: the items are not the same.
        """
        mine, theirs = self._keys(), other._keys()
        if mine == theirs:
            return self
        rows = {key: row for row, key in enumerate(mine)}
        if len(rows) != len(mine) or set(rows) != set(theirs):
            raise AlignmentError(
                "Two variants were not evaluated on the same items", fix="Compare variants of one evaluation"
            )
        order = np.array([rows[key] for key in theirs])
        return ItemScores(self.task[order], self.item_id[order], self.correct[order], self.kl[order])

    def _keys(self) -> list[tuple[str, str]]:
        return list(zip(self.task.tolist(), self.item_id.tolist(), strict=True))


def item_scores(inputs: MetricInputs) -> ItemScores:
    """Return the scores of a variant on the items that its headline values are pooled over.

    Raises `DataError`: the inputs hold no variant, or no predictions.
    """
    reason = inputs.missing(VARIANT, PREDICTIONS)
    if inputs.variant is None or reason is not None:
        raise DataError("The items of these records cannot be compared", got=reason)
    view = inputs.view
    rows = np.flatnonzero(np.isin(view.family, inputs.headline_families))
    right = inputs.variant_predictions.correct[rows, 0].astype(np.float64)
    measured = inputs.variant.option_distances is not None
    return ItemScores(
        task=view.task[rows],
        item_id=view.item_id[rows],
        correct=np.where(inputs.scored_by_both[rows], right, np.nan),
        kl=inputs.distance("kl")[rows] if measured else np.full(len(rows), np.nan),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredVariant:
    """One variant of an evaluation, as the scoreboard reads it."""

    name: str  # The variant's name, which no other variant of the scoreboard has, and the method that made it
    method: str
    run_id: str | None = None  # Its main run; None where none was started
    bits: float | None = None  # The bits that were asked for; None where the method has no such setting
    status: Status = "finished"  # Whether it has results
    reason: str = ""  # Why it has none, or not all
    # Headline results by metric: `metrics.headline(results)`
    results: Mapping[str, MetricResult] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)  # "size/bytes", "size/ratio", "size/bits_per_weight"
    seconds: Mapping[str, float] = field(default_factory=dict)  # Duration of each stage, by its name
    items: ItemScores | None = None  # What it scored on each item; None where it has no results
    left_out: str = ""  # Which of its results are not compared, and why
    runtime: str = ""  # What it was timed in, with the version, or why it has no speed; the other of the two is empty
    not_timed: str = ""


BITS = "size/bits_per_weight"
SECONDS = "seconds/total"
JUDGE, SIMILARITY = "judge/mt_bench", "judge/similarity"

MAIN_METRICS = (
    DELTA,
    FLIPS,
    "distance/all_flips_pct",
    KL,
    "distance/top1_agreement",
    "robustness/shuffle_drop_pct",
    "uncertainty/uacc",
    SIMILARITY,
    JUDGE,
)
"""The metrics of the narrow tables, in their order."""

SERVING = (DECODE_SPEEDUP, PREFILL_SPEEDUP, MEMORY_RATIO)
"""What serving a variant costs beside its baseline: in narrow tables where a variant was timed."""


@dataclass(frozen=True, kw_only=True)
class ScoreColumn:
    """One column of numbers."""

    key: str  # Name of the value: that of the metric, or "size/..." or "seconds/..."
    label: str  # What a reader sees. `unit` is as in `MetricKey`, or "bytes", "times", "bits", "seconds".
    unit: str
    direction: Direction  # Which way is better
    meaning: str
    main: bool  # Whether narrow tables have it


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One value with its interval; `low`, `high` and `n` are None where there is none."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None


def _own(name: str, label: str, unit: str, direction: Direction, meaning: str, *, main: bool) -> ScoreColumn:
    return ScoreColumn(key=name, label=label, unit=unit, direction=direction, meaning=meaning, main=main)


_SIZES = (
    _own(SIZE, "Size", "bytes", "lower", "Bytes of the stored tensors.", main=True),
    _own(
        RATIO, "Times smaller", "times", "higher", "Bytes of the baseline divided by those of the variant.", main=False
    ),
    _own(BITS, "Bits per weight", "bits", "lower", "Stored bits per weight of the linear layers.", main=True),
)
_COST = (
    _own(SECONDS, "Seconds", "seconds", "lower", "Duration of all stages together.", main=True),
    *(
        _own(f"seconds/{stage}", f"Seconds, {stage}", "seconds", "lower", f"Duration of the {stage} stage.", main=False)
        for stage in ("quantize", "evaluate", "judge")
    ),
)


def _of_metric(declared: Declared) -> ScoreColumn:
    return ScoreColumn(
        key=declared.name,
        label=declared.label,
        unit=declared.unit,
        direction=declared.direction,
        meaning=declared.meaning,
        main=declared.name in (*MAIN_METRICS, *SERVING),
    )


def columns() -> tuple[ScoreColumn, ...]:
    """Return all columns: sizes, the main metrics, serving, the other metrics of the headline table, and the cost."""
    main = (*MAIN_METRICS, *SERVING)
    others = [found for found in headline_keys() if found.name not in main]
    return (*_SIZES, *(_of_metric(found) for found in (*map(key, main), *others)), *_COST)


def cells(variant: ScoredVariant) -> dict[str, Cell]:
    """Return the values of a variant by column. What was not measured is left out."""
    found: dict[str, Cell] = {
        column.key: Cell(value=variant.sizes[column.key]) for column in _SIZES if column.key in variant.sizes
    }
    for name, result in variant.results.items():
        found[name] = Cell(value=result.value, low=result.low, high=result.high, n=result.n)
    found |= _seconds(variant.seconds)
    wanted = {column.key for column in columns()}
    return {name: cell for name, cell in found.items() if name in wanted}


def _seconds(stages: Mapping[str, float]) -> dict[str, Cell]:
    """Return the duration of each stage, and of all together."""
    each = {f"seconds/{stage}": Cell(value=seconds) for stage, seconds in stages.items()}
    return {**each, SECONDS: Cell(value=sum(stages.values()))} if each else {}
