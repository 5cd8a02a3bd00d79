"""Runs stages as child runs: as MLflow projects, in processes that end when this process ends, or in this process."""

import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from mlflow.projects.utils import get_run_env_vars, load_project
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NOTE

from mlflow_compress.errors import MlflowCompressError, StageError, StoreAwayError, breaks_off
from mlflow_compress.lifetime import BROKE_OFF, KILLED_BY, STORE_AWAY, killed_by
from mlflow_compress.paths import STARTED_IN, started_in
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.live_processes import run_ended, scratch_folder
from mlflow_compress.tracking.tracked_run import TrackedRun, create_run
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.tracking.waiting import away
from mlflow_compress.warm_python import WarmPython

logger = logging.getLogger(__name__)

_IN_PACKAGE = Path(__file__).resolve().parents[1] / "_projects" / "projects"  # the projects in an installed wheel
_IN_CHECKOUT = Path(__file__).resolve().parents[2] / "projects"


def project_folder(stage: str) -> Path:
    """Return the folder of a stage's MLflow project: in the installed package, or in the checkout."""
    return (_IN_PACKAGE if _IN_PACKAGE.is_dir() else _IN_CHECKOUT) / stage


def run_stage(
    tracker: Tracker,
    stage: str,
    parameters: Mapping[str, str],
    *,
    parent: TrackedRun,
    python: WarmPython,
    output: tuple[int, int] = (1, 2),
) -> str:
    """Run a stage's MLflow project as a child of `parent`, in this environment. Return the child's run id.

    A stage that fails is a `StageError` with the child's error, or the signal that killed it; its run is FAILED. Where
    this process is interrupted, the child is ended first, and its run is KILLED.
    """
    child = _create_child(tracker, stage, parent)
    folder = project_folder(stage)
    try:
        with scratch_folder(tracker.uri) as downloads:
            # MLflow's own local backend starts a shell, and an interpreter that has to import everything.
            command = load_project(str(folder)).get_entry_point("main").compute_command(parameters, str(downloads))
            program, *arguments = shlex.split(command)
            assert program == "python", command
            # `python` is this interpreter in what the stage starts, even if its virtual environment is not activated.
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
            ours = {**get_run_env_vars(child, tracker.experiment_id), STARTED_IN: started_in(), "PATH": path}
            environment = {**os.environ, **ours}
            returncode = python.run(arguments, environment=environment, folder=folder, output=output)
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
    """Run a stage's work, which opens its run with `tracker.run`, in this process, and return that run's id."""
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
    tracker.client.hurry()
    with suppress(StoreAwayError):
        tracker.client.set_terminated(run_id, "KILLED")
        run_ended(tracker.uri, run_id)


def _failed(tracker: Tracker, stage: str, run_id: str, returncode: int, *, reason: str | None = None) -> StageError:
    """Return the error of a failed stage. End the stage's run if its process could not do so."""
    run = tracker.client.get_run(run_id)
    noted = run.data.tags.get(run_names.RUN_ERROR)
    reason = noted if reason is None else reason
    if killer := killed_by(returncode):
        what = f"Stage {stage} {KILLED_BY} {killer}"
        fix = "The system often sends SIGKILL when memory runs out" if killer == "SIGKILL" else None
    else:
        what, fix = f"Stage {stage} failed: {reason or f'exit code {returncode}'}", None
    if run.info.status == "RUNNING":
        tracker.client.set_terminated(run_id, "FAILED")
    run_ended(tracker.uri, run_id)
    if noted is None:
        tracker.client.set_tag(run_id, run_names.RUN_ERROR, what)
        tracker.client.set_tag(run_id, MLFLOW_RUN_NOTE, f"**{what}**")
    return StageError(what, stage=stage, fix=fix, broke_off=killer is not None or returncode == BROKE_OFF)
