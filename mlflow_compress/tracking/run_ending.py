"""Ends a run with the work that it is for, however that work ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from mlflow.entities import Run, RunStatus
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from mlflow_compress.errors import StageError, SweepError, TrackingError, machine_fault
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.experiment import search_runs, tags_filter
from mlflow_compress.tracking.lease import give_back_leases
from mlflow_compress.tracking.live_processes import dead_processes, run_ended, run_not_closed, runs_not_closed
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.waiting import PatientClient

logger = logging.getLogger(__name__)


def close_dead_runs(client: PatientClient, uri: str) -> None:
    """End the runs of processes of this machine that died with runs open: they become KILLED.

    Their leases are given back. A process that is alive, or on another machine, is left alone.
    """
    for run_id in runs_not_closed(uri):  # the server was away when this process wanted to
        _close(client, run_id, "the tracking server was away at its end")
        run_ended(uri, run_id)
    with dead_processes(uri) as names:
        for name in names:
            mine = tags_filter({run_names.PROCESS: name})
            for run in search_runs(client, f"{mine} and attributes.status = 'RUNNING'"):
                _close(client, run.info.run_id, "the process was killed")
        if names:
            give_back_leases(client, set(names))


def _close(client: PatientClient, run_id: str, reason: str) -> None:
    TrackedRun(client, run_id).end("KILLED", reason)
    drop_unfinished(client, run_id)
    logger.info("Run %s is KILLED now: %s", run_id, reason)


def drop_unfinished(client: PatientClient, run_id: str) -> None:
    """Delete the artifacts and models that a killed run has stored: nobody reads the results of half a run.

    The parameters stay, from which `resume` goes on. It stores everything else again.
    """
    run: Run = client.get_run(run_id)
    if RunStatus.is_terminated(RunStatus.from_string(run.info.status)) and run.info.status != "KILLED":
        return
    try:
        stored = get_artifact_repository(run.info.artifact_uri)
        for entry in client.list_artifacts(run_id):
            if entry.path != run_names.PARAMETERS:
                stored.delete_artifacts(entry.path)
        for model in client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run_id}'"):
            get_artifact_repository(model.artifact_location).delete_artifacts()
            client.delete_logged_model(model.model_id)
    except (MlflowException, OSError, NotImplementedError) as error:
        logger.warning("The unfinished artifacts of run %s could not be deleted: %s", run_id, error)


@contextmanager
def until_ended(client: PatientClient, uri: str, run: TrackedRun) -> Iterator[None]:
    """Let the run end FINISHED, FAILED with the error, or KILLED when interrupted.

    Where the store cannot be told, the run stays open, and the next process that starts ends it. What a full disk, too
    little memory or missing rights raise becomes a `MachineError`.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        with _as_far_as_possible(uri, run):
            run.end("KILLED", "interrupted")
            drop_unfinished(client, run.run_id)
        raise
    except BaseException as error:
        fault = machine_fault(error)
        with _as_far_as_possible(uri, run):
            _fail(client, run, fault or error)
        if fault is not None:
            raise fault from error
        raise
    try:
        client.set_terminated(run.run_id, "FINISHED")
    except TrackingError:
        run_not_closed(uri, run.run_id)
        raise
    run_ended(uri, run.run_id)


@contextmanager
def _as_far_as_possible(uri: str, run: TrackedRun) -> Iterator[None]:
    try:
        yield
    except (TrackingError, MlflowException, OSError) as error:
        run_not_closed(uri, run.run_id)
        logger.warning("Run %s stays open, until the next command closes it", run.run_id)
        logger.debug("because of this: %s", error)
    else:
        run_ended(uri, run.run_id)


def _fail(client: PatientClient, run: TrackedRun, error: BaseException) -> None:
    found = client.get_run(run.run_id).data.tags.get(MLFLOW_RUN_NOTE, "")
    run.end("FAILED", str(error) or type(error).__name__)
    if isinstance(error, StageError) and error.published is not None:
        run.set_note(f"**{error.stage} failed:** {error}\n\n{found}")
    if isinstance(error, SweepError):
        run.set_note(f"{found}\n\n**{error}**")
