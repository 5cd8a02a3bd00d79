"""Makes runs that say from their first moment which process writes to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.experiment import search_runs, tags_filter
from mlflow_compress.tracking.live_processes import open_runs, own_name, run_opened
from mlflow_compress.tracking.waiting import PatientClient


def create_run(client: PatientClient, uri: str, experiment_id: str, name: str, tags: Mapping[str, object]) -> str:
    """Return the id of a new run, which is open in this process.

    A server that goes away may have made the run, and not have said so. Then this run is taken, and no second one made.
    """
    mine = {run_names.PROCESS: own_name(uri)}
    every = {**{key: str(value) for key, value in tags.items()}, **mine}

    def made(asked: Any) -> str | None:
        found = search_runs(asked, f"{tags_filter(mine)} and attributes.status = 'RUNNING'")
        return next((str(run.info.run_id) for run in found if run.info.run_id not in open_runs(uri)), None)

    def make(asked: Any) -> str:
        return str(asked.create_run(experiment_id, run_name=name, tags=every).info.run_id)

    run_id = client.once(make, made)
    run_opened(uri, run_id)
    return run_id
