"""Runs stages as child runs: as MLflow projects, in processes that end when this process ends, or in this process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from mlflow.projects.backend.loader import load_backend
from mlflow.projects.submitted_run import SubmittedRun
from mlflow.projects.utils import (
    MLFLOW_LOCAL_BACKEND_RUN_ID_CONFIG,
    PROJECT_BUILD_IMAGE,
    PROJECT_DOCKER_ARGS,
    PROJECT_DOCKER_AUTH,
    PROJECT_ENV_MANAGER,
    PROJECT_STORAGE_DIR,
    PROJECT_SYNCHRONOUS,
)
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NOTE

from mlflow_compress.errors import MlflowCompressError, StageError, StoreAwayError, breaks_off
from mlflow_compress.lifetime import BROKE_OFF, STORE_AWAY, killed_by
from mlflow_compress.paths import STARTED_IN, started_in
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.live_processes import run_ended, scratch_folder
from mlflow_compress.tracking.tracked_run import TrackedRun, create_run
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.tracking.waiting import away

logger = logging.getLogger(__name__)

_IN_PACKAGE = Path(__file__).resolve().parents[1] / "_projects" / "projects"  # the projects in an installed wheel
_IN_CHECKOUT = Path(__file__).resolve().parents[2] / "projects"


def project_folder(stage: str) -> Path:
    """Return the folder of a stage's MLflow project: in the installed package, or in the checkout."""
    return (_IN_PACKAGE if _IN_PACKAGE.is_dir() else _IN_CHECKOUT) / stage


def run_stage(tracker: Tracker, stage: str, parameters: Mapping[str, str], *, parent: TrackedRun) -> str:
    """Run a stage's MLflow project as a child of `parent`, in this environment. Return the child's run id.

    A stage that fails is a `StageError` with the child's error, or the signal that killed it; its run is FAILED. Where
    this process is interrupted, the child is ended first, and its run is KILLED.
    """
    child = _create_child(tracker, stage, parent)
    try:
        with scratch_folder(tracker.uri) as downloads, _environment():
            returncode = _wait(_start(tracker, project_folder(stage), parameters, child, str(downloads)))
    except KeyboardInterrupt:
        _end_killed(tracker, child)
        raise
    if returncode == STORE_AWAY:  # its run stays open, until the server can be told
        raise away(tracker.uri, f"for stage {stage}")
    if returncode != 0:
        raise _failed(tracker, stage, child, returncode)
    run_ended(tracker.uri, child)
    return child


def run_stage_here(tracker: Tracker, stage: str, work: Callable[[], object], *, parent: TrackedRun) -> str:
    """Run a stage's work in this process, as a child of `parent`. Return the child's run id.

    `work` opens the stage's run with `tracker.run`. A stage that fails is a `StageError`, and its run is FAILED.
    """
    child = _create_child(tracker, stage, parent)
    try:
        with tracker.filling(child):
            work()
    except (KeyboardInterrupt, SystemExit):
        _end_killed(tracker, child)
        raise
    except StoreAwayError:
        raise
    except Exception as error:
        if not isinstance(error, MlflowCompressError):
            logger.exception("Stage %s failed", stage)
        raise _failed(
            tracker, stage, child, BROKE_OFF if breaks_off(error) else 1, reason=str(error) or type(error).__name__
        ) from error
    return child


def _create_child(tracker: Tracker, stage: str, parent: TrackedRun) -> str:
    tags = {MLFLOW_PARENT_RUN_ID: parent.run_id, run_names.STAGE: stage}
    return create_run(tracker.client, tracker.uri, tracker.experiment_id, stage, tags)


def _end_killed(tracker: Tracker, run_id: str) -> None:
    """End the run of a stage that was interrupted. Where the store is away, the next process does so."""
    with suppress(StoreAwayError):
        tracker.client.set_terminated(run_id, "KILLED")
        run_ended(tracker.uri, run_id)


def _start(tracker: Tracker, folder: Path, parameters: Mapping[str, str], run_id: str, downloads: str) -> SubmittedRun:
    """Start the project's process.

    `mlflow.projects.run` does the same and waits, but does not return the exit code.
    """
    config = {
        PROJECT_ENV_MANAGER: "local",
        PROJECT_SYNCHRONOUS: True,  # False would start another `mlflow run` in between
        PROJECT_DOCKER_ARGS: None,
        PROJECT_STORAGE_DIR: downloads,
        PROJECT_BUILD_IMAGE: False,
        PROJECT_DOCKER_AUTH: None,
        MLFLOW_LOCAL_BACKEND_RUN_ID_CONFIG: run_id,
    }
    where = tracker.uri, tracker.experiment_id
    project = str(folder), "main", dict(parameters), None
    # What it tells the store comes before it starts the process.
    return tracker.client.wait_for(lambda: load_backend("local").run(*project, config, *where))


def _wait(submitted: SubmittedRun) -> int:
    """Return the exit code of the project's process. If this process is interrupted, end that one first."""
    try:
        return int(submitted.command_proc.wait())
    except KeyboardInterrupt:
        submitted.cancel()
        raise


def _failed(tracker: Tracker, stage: str, run_id: str, returncode: int, *, reason: str | None = None) -> StageError:
    """Return the error of a failed stage. End the stage's run if its process could not do so."""
    run = tracker.client.get_run(run_id)
    noted = run.data.tags.get(run_names.ERROR)
    reason = noted if reason is None else reason
    if killer := killed_by(returncode):
        what = f"Stage {stage} was killed by {killer}"
        fix = "The system often sends SIGKILL when memory runs out" if killer == "SIGKILL" else None
    else:
        what, fix = f"Stage {stage} failed: {reason or f'exit code {returncode}'}", None
    if run.info.status == "RUNNING":
        tracker.client.set_terminated(run_id, "FAILED")
    run_ended(tracker.uri, run_id)
    if noted is None:
        tracker.client.set_tag(run_id, run_names.ERROR, what)
        tracker.client.set_tag(run_id, MLFLOW_RUN_NOTE, f"**{what}**")
    return StageError(what, stage=stage, fix=fix, broke_off=killer is not None or returncode == BROKE_OFF)


@contextmanager
def _environment() -> Iterator[None]:
    """Set the environment variables of the child process, and restore them afterwards.

    `python` then means this interpreter, even if its virtual environment is not activated.
    """
    before = dict(os.environ)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), before.get("PATH", os.defpath)])
    os.environ[STARTED_IN] = started_in()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
