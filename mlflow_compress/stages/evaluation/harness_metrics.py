"""Metrics that the tasks' sources compute in their own way, beside ours."""

from __future__ import annotations

from typing import Any

from mlflow_compress.items.suite import Suite
from mlflow_compress.records import RunRecords
from mlflow_compress.stages.evaluation.run_model import ModelOutputs
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.store import OpenRun

SECTION = "harness"  # chart section of the metrics that lm-evaluation-harness's code computes
TABLE = "harness.json"


def log_harness_metrics(
    run: OpenRun, suite: Suite, measured: ModelOutputs, *, baseline: RunRecords | None = None
) -> None:
    """Log the sources' metrics of a model: those of whole tasks and groups as MLflow metrics, all in a table.

    Parameters
    ----------
    run : OpenRun
    suite : Suite
        What was asked.
    measured : ModelOutputs
        What the model answered; how many of its prompts were too long becomes a metric too.
    baseline : RunRecords, optional
        The baseline's answers, for the table.
    """
    run.log_values({run_names.TRUNCATED: measured.n_truncated})
    found = suite.own_metrics(measured.records)
    if not found:
        return
    whole = {task.name for task in suite.tasks} | {group.name for group in suite.averages}
    run.log_values({f"{SECTION}/{own.name}/{own.part}": own.value for own in found if own.part in whole})
    before = {(own.part, own.name): own.value for own in suite.own_metrics(baseline)} if baseline else {}
    rows: list[dict[str, Any]] = [
        {
            "part": own.part,
            "metric": own.name,
            "value": own.value,
            "baseline": before.get((own.part, own.name)),
            "n": own.n,
            "n_unscored": own.n_unscored,
        }
        for own in found
    ]
    run.log_json(rows, TABLE)
