"""Where unfinished work lies, so that an interrupted stage goes on instead of beginning again."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

FOLDER = Path(".mlflow_compress") / "unfinished"

logger = logging.getLogger(__name__)


@contextmanager
def unfinished(mark: str) -> Iterator[Path]:
    """Give the folder of the work with this fingerprint; it stays when the work is interrupted, and goes when it ends.

    Two processes with the same work take turns: the second waits, and will find what the first has stored.

    Parameters
    ----------
    mark : str
        Digest of everything that the result depends on.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    lock = FileLock(FOLDER / f"{mark[:16]}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.warning("Another process does the same work in %s; waiting for it", FOLDER)
        lock.acquire()
    try:
        folder = FOLDER / mark[:16]
        if folder.is_dir():
            logger.info("Going on with interrupted work in %s", folder)
        folder.mkdir(exist_ok=True)
        yield folder
        shutil.rmtree(folder)
    finally:
        lock.release()
