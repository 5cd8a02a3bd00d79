"""Which processes of this machine are alive: each holds a lock, which the operating system releases at its death.

So neither the clock nor the number of a process decides, both of which may come again.
"""

import atexit
import hashlib
import os
import platform
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from mlflow_compress.errors import TrackingError
from mlflow_compress.home import VARIABLE, home

_SUFFIX = ".lock"


def _place(uri: str) -> Path:
    """Return the folder of the locks for one store; several servers may share one home."""
    return home(uri) / "processes" / hashlib.sha256(uri.encode()).hexdigest()[:12]


@dataclass
class _Presence:
    """This process's lock for one store, the runs that it has open, and those that the store could not be told of."""

    name: str
    path: Path
    lock: FileLock
    open_runs: set[str] = field(default_factory=set)
    not_closed: set[str] = field(default_factory=set)


_mine: dict[tuple[int, str], _Presence] = {}  # by process, because a fork copies this table but not the locks


def own_host() -> str:
    """Return this machine's name, with which the names of its processes begin."""
    return re.sub(r"[^\w.-]", "-", platform.node(), flags=re.ASCII)


def own_name(uri: str) -> str:
    """Return this process's name, which is in use as long as the process lives."""
    return _presence(uri).name


def _presence(uri: str) -> _Presence:
    key = (os.getpid(), uri)
    while key not in _mine:
        name = f"{own_host()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        path = _place(uri) / f"{name}{_SUFFIX}"
        lock = FileLock(path, thread_local=False)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except OSError as error:
            raise TrackingError(
                f"The folder for unfinished work and locks cannot be written: {error.strerror or error}",
                got=str(path.parent),
                fix=f"Set {VARIABLE} to a folder that this user may write to",
            ) from error
        if path.exists():  # otherwise another process took the new file for a dead one's
            _mine[key] = _Presence(name, path, lock)
            atexit.register(_leave, key)
    return _mine[key]


def _leave(key: tuple[int, str]) -> None:
    """Forget this process where it has closed its runs. Otherwise the next one closes them, see `dead_processes`."""
    if os.getpid() != key[0]:
        return
    mine = _mine.pop(key)
    shutil.rmtree(_scratch(mine), ignore_errors=True)
    if not mine.open_runs:
        with suppress(OSError):
            mine.path.unlink(missing_ok=True)
        mine.lock.release()


def open_runs(uri: str) -> frozenset[str]:
    """Return the runs of a store that this process has open."""
    return frozenset(_presence(uri).open_runs)


def run_opened(uri: str, run_id: str) -> str:
    """Note that this process has a run open, and return the process's name."""
    mine = _presence(uri)
    mine.open_runs.add(run_id)
    return mine.name


def run_ended(uri: str, run_id: str) -> None:
    """Note that a run of this process has ended."""
    mine = _presence(uri)
    mine.open_runs.discard(run_id)
    mine.not_closed.discard(run_id)


def run_not_closed(uri: str, run_id: str) -> None:
    """Note that the work of a run has ended, and that the store could not be told."""
    _presence(uri).not_closed.add(run_id)


def runs_not_closed(uri: str) -> list[str]:
    """Return the runs of this process whose work has ended, and that are still open in the store."""
    mine = _mine.get((os.getpid(), uri))
    return [] if mine is None else list(mine.not_closed)


def _scratch(presence: _Presence) -> Path:
    return presence.path.with_suffix(".scratch")


@contextmanager
def scratch_folder(uri: str) -> Iterator[Path]:
    """Yield an empty folder that is deleted after the block; where this process is killed, by the next one."""
    parent = _scratch(_presence(uri))
    parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)


@contextmanager
def dead_processes(uri: str) -> Iterator[list[str]]:
    """Yield the names of processes that have died with runs open. They are forgotten when the block ends without error.

    While the block runs, no other process gets the same names.
    """
    alive = {presence.path for presence in _mine.values()}
    names = []
    with ExitStack() as locked:
        for path in sorted(set(_place(uri).glob(f"*{_SUFFIX}")) - alive):
            with suppress(Timeout, OSError):
                locked.enter_context(FileLock(path).acquire(timeout=0))
                names.append(path.name.removesuffix(_SUFFIX))
        yield names
        for name in names:
            path = _place(uri) / f"{name}{_SUFFIX}"
            shutil.rmtree(path.with_suffix(".scratch"), ignore_errors=True)
            path.unlink(missing_ok=True)


def is_alive(uri: str, name: str) -> bool:
    """Return whether a process of this machine is alive, by its name."""
    path = _place(uri) / f"{name}{_SUFFIX}"
    if path in {presence.path for presence in _mine.values()}:
        return True
    if not path.exists():
        return False
    try:
        with FileLock(path).acquire(timeout=0):
            return False
    except Timeout:
        return True


def alive_here(uri: str, name: str) -> bool | None:
    """Return whether a process is alive, by its name; None where this machine has no lock of it, and cannot know."""
    on_this_machine = name.rsplit("-", 2)[0] == own_host()
    return is_alive(uri, name) if on_this_machine and (_place(uri) / f"{name}{_SUFFIX}").exists() else None
