"""Metric results on their way into artifacts and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mlflow_compress.records import MetricResult

_FIELDS = ("name", "value", "low", "high", "level", "n", "n_unscored", "task", "category")


def results_json(results: Iterable[MetricResult]) -> list[dict[str, Any]]:
    """Return results as JSON rows, with full precision."""
    return [{field: getattr(result, field) for field in _FIELDS} for result in results]


def results_from_json(rows: Iterable[Mapping[str, Any]]) -> list[MetricResult]:
    """Return what `results_json` wrote."""
    return [MetricResult(**{field: row[field] for field in _FIELDS}) for row in rows]


def headline(results: Iterable[MetricResult]) -> dict[str, MetricResult]:
    """Return the pooled results by metric name."""
    return {result.name: result for result in results if result.task is None and result.category is None}
