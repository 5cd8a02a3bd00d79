"""Metric results as JSON artifacts, written and read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mlflow_compress.records import MetricResult
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.store import Store

_FIELDS = ("name", "value", "low", "high", "level", "n", "n_unscored", "task", "category")


def results_json(results: Iterable[MetricResult]) -> list[dict[str, Any]]:
    """Return results as JSON rows, with full precision."""
    return [{field: getattr(result, field) for field in _FIELDS} for result in results]


def results_from_json(rows: Iterable[Mapping[str, Any]]) -> list[MetricResult]:
    """Return the results that `results_json` has turned into rows."""
    return [MetricResult(**{field: row[field] for field in _FIELDS}) for row in rows]


def stored_results(store: Store, *run_ids: str) -> list[MetricResult]:
    """Return the results that the runs of stages hold, one run after the other."""
    return [result for run_id in run_ids for result in results_from_json(store.fetch_json(run_id, "metrics.json"))]


def logged(results: Iterable[MetricResult]) -> list[MetricResult]:
    """Return the results that are logged as MLflow metrics: pooled values and a few per task (under 100 in all)."""
    by_task = run_names.logged_by_task()
    return [r for r in results if r.category is None and (r.task is None or r.name in by_task)]
