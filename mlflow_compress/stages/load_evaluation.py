"""Loads an earlier evaluation from its run or from a folder of records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mlflow_compress.compression.checkpoint_manifest import MANIFEST_FILE, CheckpointManifest
from mlflow_compress.errors import ConfigError, TrackingError
from mlflow_compress.metrics.core.compute import compute_all, unmet
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.records import RunRecords
from mlflow_compress.results import Evaluation
from mlflow_compress.stages.evaluation.result_files import stored_results
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.store import Store, StoredRun
from mlflow_compress.tracking.tracker import Tracker

ACCEPTED = "the id of a main, evaluate or baseline run, or a folder of Parquet records"


def from_folder(folder: Path) -> Evaluation:
    """Return the evaluation of a folder of records, without a comparison to a baseline.

    Raises
    ------
    DataError
        The folder has no records, or broken ones.
    """
    inputs = MetricInputs(baseline=RunRecords.read(folder))
    return Evaluation(
        name=folder.name,
        results=tuple(compute_all(inputs)),
        not_computed=unmet(inputs),
        records_folder=folder,
    )


def from_run(run_id: str, store: Store | None = None) -> Evaluation:
    """Return the evaluation of a run. For the main run of a variant, that is the evaluation of its evaluate stage.

    Raises
    ------
    ConfigError
        The text is not a run id, or the run has no evaluation.
    TrackingError
        The store has no such run.
    """
    if not re.fullmatch("[0-9a-f]{32}", run_id):
        raise ConfigError("There is no evaluation of this name", allowed=ACCEPTED, got=run_id)
    store = store if store is not None else Tracker()
    run = store.look_up(store.child_ids(run_id).get("evaluate", run_id))
    stage = run.tags.get(run_names.STAGE)
    if stage not in ("evaluate", "baseline"):
        raise ConfigError("This run holds no evaluation", allowed=ACCEPTED, got=f"{run_id}, a run of stage {stage}")
    results = tuple(stored_results(store, run.run_id))
    records = store.fetch(run.run_id, RECORDS)
    base_model = run.tags[run_names.BASE_MODEL]
    common: dict[str, Any] = {"results": results, "records_folder": records, "run": store.link(run.run_id)}
    if stage == "baseline":
        return Evaluation(name=base_model, evaluation_id=run.tags.get(run_names.EVALUATION), **common)
    baseline_run = run.tags[run_names.BASELINE_RUN]
    return Evaluation(
        name=run.tags[run_names.VARIANT],
        not_computed=_not_computed(store, run),
        baseline=base_model,
        verdict=run.tags[run_names.VERDICT],
        manifest=_manifest(run),
        baseline_records_folder=store.fetch(baseline_run, RECORDS),
        baseline_run_id=baseline_run,
        evaluation_id=run.tags.get(run_names.EVALUATION),
        baseline_found=True,
        variant_found_in=run.run_id,
        **common,
    )


def _not_computed(store: Store, run: StoredRun) -> dict[str, str]:
    """Return the reason for each missing metric. A run that computed all metrics has no such file."""
    try:
        return dict(store.fetch_json(run.run_id, "not_computed.json"))
    except TrackingError:
        return {}


def _manifest(run: StoredRun) -> CheckpointManifest | None:
    """Return the checkpoint's manifest; None if the checkpoint was deleted."""
    folder = Path(run.tags.get(run_names.CHECKPOINT, ""))
    return CheckpointManifest.read(folder, verify=False) if (folder / MANIFEST_FILE).is_file() else None
