"""Lock files: one process at a time does a piece of work, and no file stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def alone_with(lock: Path, *, wait: bool = True) -> Iterator[bool]:
    """Yield whether this process alone has a lock file; without `wait`, False where another process has it.

    The operating system releases the lock of a killed process. The file is deleted while it is locked: whoever waited
    for it sees that it has no name any more (filelock looks at `st_nlink`), and locks a new file.
    """
    taken = FileLock(lock)
    try:
        taken.acquire(timeout=-1 if wait else 0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.unlink(missing_ok=True)
        taken.release()
