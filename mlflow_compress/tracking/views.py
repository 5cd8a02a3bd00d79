"""What a person opens: the saved leaderboard view of an experiment, and links that show it."""

from __future__ import annotations

import base64
import json
import zlib

from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from mlflow_compress.tracking import names
from mlflow_compress.tracking.store import Tracker

LEADERBOARD = "leaderboard"
_VIEW_TAG = f"mlflow.sharedViewState.{LEADERBOARD}"


def _view_state() -> dict[str, object]:
    """Return the runs-table state: variants only, headline columns first, smallest distance on top."""
    columns = [f"metrics.`{name}`" for name in names.HEADLINE]
    return {
        "searchFilter": f"tags.`{names.STAGE}` = 'main'",
        "orderByKey": "metrics.`distance/kl_mean`",
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "modelVersionFilter": "All Runs",
        "selectedColumns": [*columns, f"tags.`{names.VERDICT}`"],
        "compareRunsMode": "TABLE",
    }


def save_leaderboard(tracker: Tracker) -> None:
    """Store the leaderboard view on the experiment."""
    packed = base64.b64encode(zlib.compress(json.dumps(_view_state()).encode())).decode()
    tracker.client.set_experiment_tag(tracker.experiment_id, _VIEW_TAG, f"deflate;{packed}")


def how_to_open(tracker: Tracker, run_id: str | None = None) -> str:
    """Return the lines that tell a person where to look; for a local store, the command that starts the server too.

    A child run has none: its parent ends with them.
    """
    if run_id and MLFLOW_PARENT_RUN_ID in tracker.client.get_run(run_id).data.tags:
        return ""
    remote = tracker.uri.startswith("http")
    root = tracker.uri.rstrip("/") if remote else "http://127.0.0.1:5000"
    page = f"{root}/#/experiments/{tracker.experiment_id}"
    board = f"{page}/runs?workflowType=machine_learning&viewStateShareKey={LEADERBOARD}"
    lines = [] if remote else [f"Start the UI:  mlflow server --host 127.0.0.1 --backend-store-uri {tracker.uri}"]
    if run_id:
        lines.append(f"This run:      {page}/runs/{run_id}?workflowType=machine_learning")
    lines.append(f"Leaderboard:   {board}")
    return "\n".join(lines)
