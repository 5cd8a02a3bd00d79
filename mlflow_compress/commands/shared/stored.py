"""Evaluation metadata stored next to the record tables: tokenizer hash, few-shot settings, task hashes."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_compress import files as atomic
from mlflow_compress.errors import TrackingError
from mlflow_compress.files import read_json_object
from mlflow_compress.formats import upgraded
from mlflow_compress.metrics.core.account import Account
from mlflow_compress.records import MetricResult
from mlflow_compress.tracking import run_names

if TYPE_CHECKING:  # MLflow takes seconds to import, and files of answers are compared without it
    from mlflow_compress.tracking.tracked_run import TrackedRun
    from mlflow_compress.tracking.tracker import Tracker

METRICS_FILE = "metrics.json"
METRICS_FORMAT = 1
_FIELDS = tuple(field.name for field in fields(MetricResult))


def results_json(results: Iterable[MetricResult]) -> list[dict[str, Any]]:
    """Return results as JSON rows, with full precision."""
    return [{field: getattr(result, field) for field in _FIELDS} for result in results]


def results_from_json(rows: Iterable[Mapping[str, Any]]) -> list[MetricResult]:
    """Return the results that `results_json` has turned into rows."""
    values = itemgetter(*_FIELDS)
    return [MetricResult(*values(row)) for row in rows]


def metrics_file(results: Iterable[MetricResult]) -> dict[str, Any]:
    """Return the content of a run's `METRICS_FILE`."""
    return {"format": METRICS_FORMAT, "results": results_json(results)}


def results_in(content: Any, run_id: str) -> list[MetricResult]:
    """Return the results in the content of a run's `METRICS_FILE`."""
    found = content.get("format") if isinstance(content, dict) else None
    again = "Run the stage again"
    today = upgraded(METRICS_FILE, content, found, METRICS_FORMAT, got=f"run {run_id}", error=TrackingError, fix=again)
    return results_from_json(today["results"])


def stored_results(store: "Tracker", *run_ids: str) -> list[MetricResult]:
    """Return the results that the runs of stages hold, one run after the other."""
    return [result for run_id in run_ids for result in results_in(store.fetch_json(run_id, METRICS_FILE), run_id)]


def read_account(store: "Tracker", run_id: str) -> Account:
    """Return the account of an evaluate run."""
    return Account.from_dict(store.fetch_json(run_id, run_names.ACCOUNT))


def log_results(run: "TrackedRun", results: Sequence[MetricResult]) -> None:
    """Log the results of a stage: the few that are MLflow metrics, and all in a file."""
    run.log_results(logged(results))
    run.log_json(metrics_file(results), METRICS_FILE)


def logged(results: Iterable[MetricResult]) -> list[MetricResult]:
    """Return the results that are logged as MLflow metrics: pooled values and a few per task (under 100 in all)."""
    by_task = run_names.logged_by_task()
    return [r for r in results if r.category is None and (r.task is None or r.name in by_task)]


FACTS_FILE = "about.json"
EvalMetadata = dict[str, object]


def write_metadata(folder: Path, content: EvalMetadata) -> None:
    """Write the metadata into a folder of records."""
    atomic.write(folder / FACTS_FILE, (json.dumps(content, indent=1) + "\n").encode())


def read_metadata(folder: Path) -> EvalMetadata:
    """Return the metadata in a folder of records; empty where the records come without it."""
    path = folder / FACTS_FILE
    return read_json_object(path) if path.is_file() else {}
