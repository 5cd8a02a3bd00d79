"""The columns of the scoreboard. Labels, units and directions of metrics are those that the metrics declare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlflow_compress.decide.gates import DECODE_SPEEDUP, FLIPS, KL, MEMORY_RATIO, PREFILL_SPEEDUP, RATIO, SIZE
from mlflow_compress.decide.scoreboard.scored_variant import ScoredVariant
from mlflow_compress.metrics.core.metric_registry import Direction, headline_keys, key
from mlflow_compress.metrics.core.metric_registry import MetricKey as Declared

BITS = "size/bits_per_weight"
DELTA = "quality/accuracy_delta"
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
    """One column of numbers.

    Attributes
    ----------
    key : str
        Name of the value: that of the metric, or "size/..." or "seconds/...".
    label, unit, meaning : str
        What a reader sees. `unit` is as in `MetricKey`, or "bytes", "times", "bits", "seconds".
    direction : {"higher", "lower", "neither"}
        Which way is better.
    main : bool
        Whether narrow tables have it.
    """

    key: str
    label: str
    unit: str
    direction: Direction
    meaning: str
    main: bool


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
