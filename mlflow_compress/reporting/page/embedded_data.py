"""The data that the page's script reads: JSON, compressed, as base64, within a limit."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

from mlflow_compress.decide.scoreboard import ScoreColumn
from mlflow_compress.decide.scoreboard.score_columns import DELTA
from mlflow_compress.reporting.numbers import scale_of
from mlflow_compress.reporting.page.answer_pairs import answer_data
from mlflow_compress.reporting.page.explorer import explorer_data
from mlflow_compress.reporting.page.page_content import PageContent

# Of 14,042 items with prompts of MMLU's length and 8 variants (benchmarks/page.py), the changed answers take 2.2 MB in
# this form, and 2.0 MB as Parquet with zstd. For the second, a page needs a reader of Parquet and of zstd, some 100 kB.
# For the first, every browser has one: DecompressionStream, which works from disk and in a sandbox too.

MOST_BYTES = 4_000_000
"""Largest size of the embedded data; script, style and tables fit into the rest of 5 MB."""


def packed(value: Any) -> str:
    """Return a value as base64 text of compressed JSON. It has no character that HTML reads as markup."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode("ascii")


def page_data(content: PageContent, *, most_bytes: int = MOST_BYTES) -> tuple[str, dict[str, Any]]:
    """Return the page's data as text, and as values.

    Where all changed answers together are too large, those with the smallest margins of the baseline are left out; the
    values say how many there are in all.
    """
    data: dict[str, Any] = {"scores": score_data(content), "answers": answer_data(content), "alike": map_data(content)}
    most: int | None = None
    while True:
        changes = explorer_data(content.items, content.changes, most=most) if content.items is not None else None
        text = packed({**data, "changes": changes})
        if len(text) <= most_bytes or changes is None or changes["shown"] == 0:
            return text, {**data, "changes": changes}
        most = int(changes["shown"] * min(0.95 * most_bytes / len(text), 0.9))


def map_data(content: PageContent) -> dict[str, Any] | None:
    """Return the models as points: how alike they answer; None where nothing tells them apart."""
    found = content.similarity
    if found is None or found.shares is None:
        return None
    points = [
        {"name": name, "x": x, "y": y, "alike": alike}
        for name, (x, y), alike in zip(found.names, found.coordinates.tolist(), found.values[0].tolist(), strict=True)
    ]
    return {"points": points, "shares": found.shares}


def score_data(content: PageContent) -> dict[str, Any]:
    """Return what the figures draw: columns, values with intervals, and the groups that cannot be told apart."""
    board = content.board
    return {
        "columns": [_axis(column) for column in board.columns],
        "rows": [
            {
                "name": row.name,
                "method": row.method,
                "front": row.on_front,
                "cells": {key: [cell.value, cell.low, cell.high] for key, cell in row.cells.items()},
            }
            for row in board.finished
        ],
        "groups": {metric: [list(group) for group in groups] for metric, groups in board.groups.items()},
        "level": board.level,
    }


def _axis(column: ScoreColumn) -> dict[str, Any]:
    """Return a column as an axis: values times `factor` have the unit `suffix`."""
    own = {"bytes": (1e-6, "MB"), "times": (1.0, ""), "bits": (1.0, "bits"), "seconds": (1.0, "s")}
    scale = scale_of(column.unit)
    unit = scale.difference_suffix if column.key == DELTA else scale.suffix
    factor, suffix = own.get(column.unit, (scale.factor, unit.strip()))
    return {
        "key": column.key,
        "label": column.label,
        "direction": column.direction,
        "factor": factor,
        "suffix": suffix,
    }
