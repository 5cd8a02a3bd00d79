"""Rows of the report's tables, as text: changed answers, tasks and categories, pooled values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlflow_compress.metrics.core.metric_registry import all_keys
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.numbers import NATS, PERCENT, PLAIN, SHARE, Scale, interval_text, scale_of, value_text
from mlflow_compress.reporting.rows import Pooled

FLIPS_SHOWN = 50
_LONG = 280  # longest question that is not folded, in characters


@dataclass(frozen=True, kw_only=True)
class FlipRow:
    """One changed answer."""

    question: str  # The complete question
    summary: str | None  # Beginning of a long question, which is folded under it; None for a short question
    where: str  # Task, category and item id
    gold: str | None  # The correct answer and the answers of both models; None if there is none
    baseline: str | None
    variant: str | None
    kind: str  # "c2w", "w2c" or "w2w"


@dataclass(frozen=True, kw_only=True)
class PartRow:
    """One task or one of its categories. A cell is None if its metric was not computed."""

    name: str
    is_task: bool
    n: str
    cells: list[str | None]


@dataclass(frozen=True, kw_only=True)
class PartsTable:
    """The table of tasks and categories. A column without any value is left out."""

    columns: list[str]
    rows: list[PartRow]


@dataclass(frozen=True, kw_only=True)
class ValueRow:
    """One pooled value with its interval and its MLflow key."""

    key: str
    meaning: str
    value: str
    n: int
    n_unscored: int


def flip_rows(flips: Sequence[Mapping[str, Any]]) -> list[FlipRow]:
    """Return the first `FLIPS_SHOWN` changed answers."""
    return [_flip_row(row) for row in flips[:FLIPS_SHOWN]]


def _flip_row(row: Mapping[str, Any]) -> FlipRow:
    question = str(row["question"])
    return FlipRow(
        question=question,
        summary=f"{question[:_LONG]}…" if len(question) > _LONG else None,
        where=" · ".join(str(row[name]) for name in ("task", "category", "item_id") if row[name] is not None),
        gold=row["gold"],
        baseline=row["baseline"],
        variant=row["variant"],
        kind=row["kind"],
    )


_PART_COLUMNS = (
    ("quality/accuracy_baseline", "Baseline", SHARE),
    ("quality/accuracy", "Variant", SHARE),
    ("quality/accuracy_delta", "Difference", SHARE),
    ("distance/flips_pct", "Flipped", PERCENT),
    ("distance/all_flips_pct", "Changed at all", PERCENT),
    ("distance/kl_mean", "KL, nats", NATS),
)


def parts_table(results: Sequence[MetricResult]) -> PartsTable:
    """Return one row per task, each followed by its categories."""
    parts: dict[tuple[str, str | None], dict[str, MetricResult]] = {}
    wanted = {name for name, _, _ in _PART_COLUMNS}
    for result in results:
        if result.task is not None and result.name in wanted:
            parts.setdefault((result.task, result.category), {})[result.name] = result
    columns = [column for column in _PART_COLUMNS if any(column[0] in values for values in parts.values())]
    rows = []
    for (task, category), values in sorted(parts.items(), key=lambda part: (part[0][0], part[0][1] or "")):
        most = max(values.values(), key=lambda result: result.n)
        unscored = f" ({most.n_unscored:,} unscored)" if most.n_unscored else ""
        rows.append(
            PartRow(
                name=task if category is None else category,
                is_task=category is None,
                n=f"{most.n:,}{unscored}",
                cells=[_part_cell(values.get(name), name, scale) for name, _, scale in columns],
            )
        )
    return PartsTable(columns=[label for _, label, _ in columns], rows=rows)


def _part_cell(result: MetricResult | None, name: str, scale: Scale) -> str | None:
    """Return a value with its interval; an accuracy without, because the interval of the difference is more useful."""
    if result is None:
        return None
    is_difference = name.endswith("_delta")
    if name.startswith("quality/") and not is_difference:
        return value_text(result, scale)
    return interval_text(result, scale, difference=is_difference)


def value_rows(pooled: Pooled) -> list[ValueRow]:
    """Return every pooled value, sorted by key."""
    keys = all_keys()
    rows = []
    for name, result in sorted(pooled.items()):
        declared = keys.get(name)
        scale = scale_of(declared.unit) if declared else PLAIN
        rows.append(
            ValueRow(
                key=name,
                meaning=declared.meaning if declared else "",
                value=interval_text(result, scale, difference=name.endswith(("_delta", "_delta_pct"))),
                n=result.n,
                n_unscored=result.n_unscored,
            )
        )
    return rows
