"""Work folders that survive an interruption, so that an interrupted stage resumes instead of starting again."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from mlflow_compress.home import home

logger = logging.getLogger(__name__)


def workdirs_folder(tracking_uri: str) -> Path:
    """Return the folder of all work folders of a tracking store; it is not created here."""
    return home(tracking_uri) / "unfinished"


def _places(tracking_uri: str, fingerprint: str) -> tuple[Path, Path, FileLock]:
    """Return the folder of all work folders, that of one fingerprint, and its lock."""
    workdirs = workdirs_folder(tracking_uri)
    return workdirs, workdirs / fingerprint[:16], FileLock(workdirs / f"{fingerprint[:16]}.lock")


def drop_finished_workdir(tracking_uri: str, fingerprint: str) -> None:
    """Delete the work folder of work that is stored: a process that was killed just then could not do it."""
    _, folder, lock = _places(tracking_uri, fingerprint)
    if not folder.is_dir():
        return
    with suppress(Timeout), lock.acquire(timeout=0):  # another process deletes it now
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def resumable_workdir(tracking_uri: str, fingerprint: str) -> Iterator[Path]:
    """Yield the work folder of this fingerprint. It is deleted when the work ends, and kept when it is interrupted.

    Two processes with the same fingerprint take turns: the second one waits, then finds the results of the first.

    Parameters
    ----------
    tracking_uri : str
        URI of the tracking store. It decides where the folder is (see `home`), whatever the working folder of a stage.
    fingerprint : str
        Digest of everything that the result depends on.
    """
    workdirs, folder, lock = _places(tracking_uri, fingerprint)
    workdirs.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.warning("Another process does the same work in %s; waiting for it", workdirs)
        lock.acquire()
    try:
        if folder.is_dir():
            logger.info("Resuming interrupted work in %s", folder)
        folder.mkdir(exist_ok=True)
        yield folder
        shutil.rmtree(folder)
    finally:
        lock.release()
