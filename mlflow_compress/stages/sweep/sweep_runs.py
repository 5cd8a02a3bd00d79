"""The runs of a sweep: its parent run, which the same command opens again, and one process per variant at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from mlflow_compress.stages.resumable_workdir import workdirs_folder
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.shared_store.dead_runs import close_dead_runs
from mlflow_compress.tracking.shared_store.live_processes import is_alive
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker

_DYING_SECONDS = 20.0  # until the system has ended a process that was killed


@contextmanager
def one_process(tracker: Tracker, key: str, *, wait: bool) -> Iterator[bool]:
    """Yield whether this process alone has the key; without `wait`, False where another process has it.

    The operating system releases the lock of a killed process.
    """
    folder: Path = workdirs_folder(tracker.uri)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f"sweep-{key[:16]}.lock")
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


@contextmanager
def parent_run(
    tracker: Tracker, name: str, key: str, tags: Mapping[str, str], *, stage: str = "sweep"
) -> Iterator[TrackedRun]:
    """Open the parent run of a sweep or a search: the unfinished one of the same key, or a new one.

    Where another process runs the same at this moment, this one has a parent run of its own.
    """
    with one_process(tracker, key, wait=False) as alone:
        unfinished = tracker.find_unfinished(stage, **{run_names.SWEEP_KEY: key}) if alone else []
        if unfinished:
            tracker.hand_over(unfinished[0])
            tracker.end_children(unfinished[0])
            with tracker.reopen(unfinished[0]) as run:
                yield run
        else:
            with tracker.run(name, stage, {run_names.SWEEP_KEY: key, **tags}) as run:
                yield run


def close_killed(tracker: Tracker, parent: str) -> None:
    """Close the runs that workers of a sweep have left open when they were killed: they become KILLED."""
    open_mains = [
        run.data.tags[run_names.PROCESS]
        for run_id in tracker.find_unfinished("main", **{run_names.PARENT: parent})
        if (run := tracker.client.get_run(run_id)).info.status == "RUNNING"
    ]
    until = time.monotonic() + _DYING_SECONDS
    while any(is_alive(tracker.uri, process) for process in open_mains) and time.monotonic() < until:
        time.sleep(0.1)
    close_dead_runs(tracker.client, tracker.uri)
