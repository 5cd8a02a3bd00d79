"""Metrics that lm-evaluation-harness's own code computes from our records."""

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
    run: OpenRun, suite: Suite, outputs: ModelOutputs, *, baseline: RunRecords | None = None
) -> None:
    """Log the harness's metrics of a model: of tasks and groups as MLflow metrics, of their parts too in a table.

    Parameters
    ----------
    run : OpenRun
    suite : Suite
        The tasks that were evaluated.
    outputs : ModelOutputs
        Of the model. The number of truncated prompts is logged as a metric, too.
    baseline : RunRecords, optional
        The baseline's records, for a column of the table.
    """
    run.log_values({run_names.TRUNCATED: outputs.n_truncated})
    metrics = suite.harness_metrics(outputs.records)
    if not metrics:
        return
    tasks_and_groups = {task.name for task in suite.tasks} | {group.name for group in suite.averages}
    run.log_values(
        {
            f"{SECTION}/{metric.name}/{metric.part}": metric.value
            for metric in metrics
            if metric.part in tasks_and_groups
        }
    )
    of_baseline = (
        {(metric.part, metric.name): metric.value for metric in suite.harness_metrics(baseline)} if baseline else {}
    )
    rows: list[dict[str, Any]] = [
        {
            "part": metric.part,
            "metric": metric.name,
            "value": metric.value,
            "baseline": of_baseline.get((metric.part, metric.name)),
            "n": metric.n,
            "n_unscored": metric.n_unscored,
        }
        for metric in metrics
    ]
    run.log_json(rows, TABLE)
