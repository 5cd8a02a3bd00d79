"""Tables over variants: flips by category, changed answers that variants share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mlflow_compress.decide.gates import FLIPS
from mlflow_compress.metrics.core.item_table import ItemTable
from mlflow_compress.metrics.model_similarity import ModelSimilarity
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.page.page_content import PageContent, shared_changes

LEVELS = 8
"""Shades of a heat map."""

MOST_PAIRED = 24
"""Most variants whose pairs are shown; the table of pairs grows with the square."""


@dataclass(frozen=True, kw_only=True)
class HeatCell:
    """One cell: the result behind it, and its shade from 0 to `LEVELS`."""

    result: MetricResult
    level: int


@dataclass(frozen=True, kw_only=True)
class HeatRow:
    """One task or category: the cells by variant, None where a variant has no value."""

    task: str
    category: str | None
    n: int
    cells: Sequence[HeatCell | None]


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Flips of every variant in every task and category, in percent."""

    variants: Sequence[str]
    rows: Sequence[HeatRow]


@dataclass(frozen=True, kw_only=True)
class SharedChanges:
    """Changed answers that variants share."""

    variants: Sequence[str]  # Those of the table of pairs; the closest ones where there are more than `MOST_PAIRED`
    together: Sequence[Sequence[int]]  # Items that both variants changed; the diagonal has each variant's own
    # Shades: the share of the row's changed answers that the column's variant changed too
    levels: Sequence[Sequence[int]]
    by_count: Mapping[int, int]  # Number of items that exactly k variants changed, by k; over all variants
    n_variants: int  # Variants, and items whose answers are right or wrong, that these numbers are from
    n_items: int


@dataclass(frozen=True, kw_only=True)
class AlikeTable:
    """The similarity of every pair of models."""

    names: Sequence[str]  # The baseline's two samples, and the first variants of the scoreboard
    values: Sequence[Sequence[float]]  # The similarities
    levels: Sequence[Sequence[int]]  # Shades: 0 for the smallest similarity of the table, the strongest for 1
    found: ModelSimilarity  # Everything: also models that the table leaves out


def alike_table(content: PageContent) -> AlikeTable | None:
    """Return the similarity of the models' answers; None where no judge stage embedded them."""
    found = content.similarity
    if found is None:
        return None
    shown = found.values[:MOST_PAIRED, :MOST_PAIRED]
    room = 1.0 - float(shown.min()) if found.shares is not None else 0.0
    return AlikeTable(
        names=found.names[:MOST_PAIRED],
        values=shown.tolist(),
        levels=[[_level(room - (1.0 - value), room) for value in row] for row in shown.tolist()],
        found=found,
    )


def heat_map(content: PageContent) -> HeatMap:
    """Return the flips by task and category; rows without any value are left out."""
    parts: dict[tuple[str, str | None], dict[str, MetricResult]] = {}
    for variant in content.variants:
        for result in variant.results:
            if result.name == FLIPS and result.task is not None:
                parts.setdefault((result.task, result.category), {})[variant.name] = result
    highest = max((r.value for found in parts.values() for r in found.values()), default=0.0)
    names = [variant.name for variant in content.variants]
    rows = []
    for (task, category), found in sorted(parts.items(), key=lambda part: (part[0][0], part[0][1] or "")):
        cells = [
            HeatCell(result=found[n], level=_level(found[n].value, highest)) if n in found else None for n in names
        ]
        rows.append(HeatRow(task=task, category=category, n=max(r.n for r in found.values()), cells=cells))
    return HeatMap(variants=names, rows=rows)


def _level(value: float, highest: float) -> int:
    return round(LEVELS * value / highest) if highest > 0 else 0


def shared_table(content: PageContent) -> SharedChanges | None:
    """Return which changed answers variants share; None without two variants that have items."""
    changes = content.changes
    if content.items is None or len(changes) < 2:
        return None
    view = ItemTable(content.items)
    together, by_count = shared_changes(changes, len(content.items))
    n = min(len(changes), MOST_PAIRED)
    shown = together[:n, :n].tolist()
    return SharedChanges(
        variants=list(changes)[:n],
        together=shown,
        levels=[[_level(value, row[i]) for value in row] for i, row in enumerate(shown)],
        by_count=by_count,
        n_variants=len(changes),
        n_items=int(np.isin(view.family, view.graded).sum()),
    )
