"""Reads the artifacts of runs: in place where they lie in a local folder, otherwise through the download cache."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import mlflow
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.utils.file_utils import local_file_uri_to_path

from mlflow_compress.errors import TrackingError
from mlflow_compress.files.json_text import read_json
from mlflow_compress.home import home
from mlflow_compress.tracking.downloads import Downloads, limit_bytes
from mlflow_compress.tracking.shared_store.waiting import PatientClient, patiently


def local_folder(client: PatientClient, uri: str, run_id: str, folder: str) -> Path:
    """Return the local path of an artifact folder of a run.

    Artifacts in a local folder are read in place. Others are downloaded once, into the cache below `home`. Those of an
    unfinished run may still change, so they go into a temporary folder that this process deletes.
    """

    def download(target: Path) -> None:
        where = {"dst_path": str(target), "tracking_uri": uri}
        patiently(lambda: mlflow.artifacts.download_artifacts(run_id=run_id, artifact_path=folder, **where), uri)

    try:
        info = client.get_run(run_id).info
        if _is_local(info.artifact_uri):
            # `mlflow.artifacts.download_artifacts` would copy them into a temporary folder, and leave it there.
            path = Path(local_file_uri_to_path(info.artifact_uri)) / folder
            if not path.exists():
                raise FileNotFoundError(f"there is no {path}")
            return path
        if info.status != "FINISHED":
            scratch = Path(tempfile.mkdtemp())
            atexit.register(shutil.rmtree, scratch, ignore_errors=True)
            download(scratch)
            return scratch / folder
        cache = Downloads(home(uri) / "downloads", limit_bytes())
        return cache.get(f"{run_id}.{folder.replace('/', '.')}", download) / folder
    except (MlflowException, OSError) as error:
        raise TrackingError(
            f"The artifacts '{folder}' of run {run_id} cannot be read: {str(error).splitlines()[0]}",
            fix="Delete that run, so that it is computed again",
        ) from error


def json_artifact(run_id: str, name: str) -> Any:
    """Return a JSON artifact of a run. An unknown name is a `TrackingError`."""
    try:
        return patiently(lambda: mlflow.artifacts.load_dict(f"runs:/{run_id}/{name}"), mlflow.get_tracking_uri())
    except (MlflowException, OSError) as error:
        raise TrackingError(f"Run {run_id} has no artifact {name!r} that can be read", got=str(error)) from error


def json_of_found(run: Run, name: str) -> Any:
    """Return a JSON artifact of a run that a search has found. This is faster than `json_artifact` for many runs."""
    if not _is_local(run.info.artifact_uri):
        return json_artifact(run.info.run_id, name)
    try:
        return read_json(Path(local_file_uri_to_path(run.info.artifact_uri)) / name, error=TrackingError)
    except TrackingError as error:
        raise TrackingError(
            f"Run {run.info.run_id} has no artifact {name!r} that can be read", got=str(error)
        ) from error


def _is_local(artifact_uri: str) -> bool:
    return urlparse(artifact_uri).scheme in ("", "file")
