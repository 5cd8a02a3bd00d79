"""Work folders that survive an interruption, so that an interrupted stage goes on instead of beginning again."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from mlflow_compress.home import home

logger = logging.getLogger(__name__)


def unfinished_folder(tracking_uri: str) -> Path:
    """Return the folder that holds all unfinished work of a tracking store; it is not created here."""
    return home(tracking_uri) / "unfinished"


@contextmanager
def unfinished(tracking_uri: str, mark: str) -> Iterator[Path]:
    """Give the folder of the work with this fingerprint; it stays when the work is interrupted, and goes when it ends.

    Two processes with the same work take turns: the second waits, and will find what the first has stored.

    Parameters
    ----------
    tracking_uri : str
        Of the tracking store, which decides where the folder lies (see `home`): the same wherever a stage is started.
    mark : str
        Digest of everything that the result depends on.
    """
    every = unfinished_folder(tracking_uri)
    every.mkdir(parents=True, exist_ok=True)
    lock = FileLock(every / f"{mark[:16]}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.warning("Another process does the same work in %s; waiting for it", every)
        lock.acquire()
    try:
        folder = every / mark[:16]
        if folder.is_dir():
            logger.info("Going on with interrupted work in %s", folder)
        folder.mkdir(exist_ok=True)
        yield folder
        shutil.rmtree(folder)
    finally:
        lock.release()
