"""Ends a run with the work that it is for, however that work ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from mlflow_compress.errors import StageError, SweepError, TrackingError, machine_fault
from mlflow_compress.tracking.shared_store.dead_runs import drop_unfinished
from mlflow_compress.tracking.shared_store.live_processes import run_ended, run_not_closed
from mlflow_compress.tracking.shared_store.waiting import PatientClient
from mlflow_compress.tracking.tracked_run import TrackedRun

logger = logging.getLogger(__name__)


@contextmanager
def until_ended(client: PatientClient, uri: str, run: TrackedRun) -> Iterator[None]:
    """Let the run end FINISHED, FAILED with the error, or KILLED when interrupted.

    Where the store cannot be told, the run stays open, and the next process that starts ends it.

    Raises
    ------
    MachineError
        In place of what a full disk, too little memory or missing rights have raised.
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
