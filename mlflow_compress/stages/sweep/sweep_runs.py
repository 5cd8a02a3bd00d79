"""The runs of a sweep: its parent run, which the same command opens again, and one process per variant at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from mlflow_compress.stages.resumable_workdir import workdirs_folder
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker


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
