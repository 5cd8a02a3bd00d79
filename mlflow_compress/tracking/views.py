"""The saved leaderboard view of an experiment, and links to it."""

from __future__ import annotations

import base64
import json
import zlib

from mlflow.utils.file_utils import get_local_path_or_none
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker

LEADERBOARD = "leaderboard"  # of the newest evaluation; `leaderboard-<id8>` is that of a given evaluation


def view_tag(key: str) -> str:
    """Return the experiment tag that holds a saved view for MLflow's UI."""
    return f"mlflow.sharedViewState.{key}"


def _key(evaluation: str) -> str:
    """Return the name of an evaluation's view."""
    return f"{LEADERBOARD}-{evaluation[:8]}"


def _view_state(evaluation: str) -> dict[str, object]:
    """Return the state of the runs table: one evaluation's variants, headline columns first, sorted by KL."""
    columns = [f"metrics.`{name}`" for name in (*run_names.leaderboard(), run_names.ITEMS)]
    return {
        "searchFilter": f"tags.`{run_names.STAGE}` = 'main' and tags.`{run_names.EVALUATION}` = '{evaluation}'",
        "orderByKey": "metrics.`distance/kl_mean`",
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "modelVersionFilter": "All Runs",
        "selectedColumns": [*columns, f"tags.`{run_names.VERDICT}`"],
        "compareRunsMode": "TABLE",
    }


def save_leaderboard(tracker: Tracker, run_id: str) -> None:
    """Store the leaderboard of a run's evaluation on the experiment, under its own name and as the newest one.

    A saved view filters by fixed values, so each evaluation needs its own. A run without an evaluation id has none.
    """
    evaluation = tracker.client.get_run(run_id).data.tags.get(run_names.EVALUATION)
    if evaluation is None:
        return
    packed = base64.b64encode(zlib.compress(json.dumps(_view_state(evaluation)).encode())).decode()
    for key in (_key(evaluation), LEADERBOARD):
        tracker.client.set_experiment_tag(tracker.experiment_id, view_tag(key), f"deflate;{packed}")


def _root(tracker: Tracker) -> str:
    """Return the address of the UI; for a local store, that of the command that `how_to_open` shows."""
    return tracker.uri.rstrip("/") if tracker.uri.startswith("http") else "http://127.0.0.1:5000"


def run_address(tracker: Tracker, experiment_id: str, run_id: str) -> str:
    """Return the address that shows a run in MLflow's UI."""
    return f"{_root(tracker)}/#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"


def how_to_open(tracker: Tracker, run_id: str | None = None) -> str:
    """Return the lines that say where results are. For a local store they include the command that starts the UI.

    The text is empty for a child run, because its parent prints the lines.
    """
    run = tracker.client.get_run(run_id) if run_id else None
    tags = run.data.tags if run else {}
    if MLFLOW_PARENT_RUN_ID in tags:
        return ""
    remote = tracker.uri.startswith("http")
    page = f"{_root(tracker)}/#/experiments/{tracker.experiment_id}"
    lines = [] if remote else [f"Start the UI:  mlflow server --host 127.0.0.1 --backend-store-uri {tracker.uri}"]
    if run:
        lines.insert(0, f"Artifacts:     {get_local_path_or_none(run.info.artifact_uri) or run.info.artifact_uri}")
        lines.append(f"This run:      {run_address(tracker, tracker.experiment_id, str(run_id))}")
    key = _key(tags[run_names.EVALUATION]) if run_names.EVALUATION in tags else LEADERBOARD
    if view_tag(key) in tracker.client.get_experiment(tracker.experiment_id).tags:
        lines.append(f"Leaderboard:   {page}/runs?workflowType=machine_learning&viewStateShareKey={key}")
    return "\n".join(lines)
