"""Several processes that score together: the first leads, the others do what it sends them.

`torchrun` or `accelerate launch` starts them, and says in the environment how many there are and where they meet. The
leader runs the user's command as if it were alone; the others only `serve`. They wait at the meeting point (a key-value
store) until the leader opens a round: a gloo group in which it hands out jobs, the work, and another group in which it
collects the results. A stage that the leader starts as a process of its own opens rounds in its place. When a process
is killed, the launcher ends the rest.

No group is open while anybody works or waits. Libraries take an open one for a model that is spread over processes
(compressed-tensors exchanges weights in it when a checkpoint is loaded, and waits for ever), and who waits in one
cannot be interrupted.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from mlflow_compress.errors import ConfigError, MlflowCompressError, WorkerError

T = TypeVar("T")

_LED = "MLFLOW_COMPRESS_LED"  # set by the leader for the stages that it starts: they lead for it
_ROUNDS, _END = "rounds", "end"  # keys of the store
_PAUSE = 0.1  # seconds between two looks at it
_PATIENCE = timedelta(hours=1)  # of a group, in which all that happens is sending

logger = logging.getLogger(__name__)
_current: Team | None = None


@dataclass(frozen=True)
class _Failed:
    """What a process answers that could not do its job."""

    text: str


class Team:
    """The processes of this job, as their leader sees them.

    Attributes
    ----------
    size : int
        How many there are, the leader among them.
    """

    def __init__(self, store: Any, size: int) -> None:
        self._store = store
        self.size = size

    def share_out(self, jobs: Sequence[Any], own: Callable[[], T]) -> tuple[T, list[Any]]:
        """Let the others do the `jobs`, at most one each, and do `own` work meanwhile.

        Returns
        -------
        T, list
            What `own` returned, and what each job gave, in order.

        Raises
        ------
        WorkerError
            When another process fails, with its error, or ends.
        """
        import torch.distributed as dist

        number = self._store.add(_ROUNDS, 1)
        given: list[Any] = [None]
        answers: list[Any] = [None] * self.size
        with _group(self._store, f"{number}-out", rank=0, size=self.size):
            idle = [None] * (self.size - 1 - len(jobs))
            dist.scatter_object_list(given, [None, *jobs, *idle], src=0)
        collect = "no"
        try:
            mine = own()
            while self._store.add(f"{number}-ready", 0) < self.size - 1:
                time.sleep(_PAUSE)
            collect = "yes"
        finally:
            self._store.set(f"{number}-collect", collect)
        with _group(self._store, f"{number}-back", rank=0, size=self.size):
            dist.gather_object(None, answers, dst=0)
        for rank, answer in enumerate(answers):
            if isinstance(answer, _Failed):
                raise WorkerError(f"Process {rank + 1} of {self.size} failed: {answer.text}")
        return mine, answers[1 : len(jobs) + 1]


def current() -> Team | None:
    """Return the team that this process leads, or None where it is alone."""
    return _current


def n_processes() -> int:
    """Return how many processes were started for this job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def serves() -> bool:
    """Whether this process is there to serve another one."""
    return n_processes() > 1 and os.environ.get("RANK", "0") != "0"


@contextmanager
def leading() -> Iterator[None]:
    """Lead the other processes until the block ends, however it ends; they end then too. Alone, do nothing."""
    global _current
    if n_processes() == 1:
        yield
        return
    led = os.environ.get(_LED) is not None
    store = _meeting_point(host=not led)
    os.environ[_LED] = "1"
    _current = Team(store, n_processes())
    try:
        yield
    finally:
        _current = None
        if not led:
            del os.environ[_LED]
            store.set(_END, "")


def serve(do: Callable[[Any], Any]) -> int:
    """Do the leader's jobs until it ends, and return the exit code. The job's failures are the leader's to report."""
    for number in (signal.SIGINT, signal.SIGTERM):  # nothing is to be cleaned up, and waiting must be interruptible
        signal.signal(number, signal.SIG_DFL)
    store = _meeting_point(host=False)
    done = 0
    while True:
        try:
            if store.add(_ROUNDS, 0) > done:
                done += 1
                _take_part(store, done, do)
            elif store.check([_END]):
                return 0
            else:
                time.sleep(_PAUSE)
        except WorkerError as error:
            logger.warning("%s", error)  # the leader may yet open another round
        except RuntimeError:  # the leader, where it keeps the store, has ended
            return 0


def _take_part(store: Any, number: int, do: Callable[[Any], Any]) -> None:
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), n_processes()
    given: list[Any] = [None]
    with _group(store, f"{number}-out", rank=rank, size=size):
        dist.scatter_object_list(given, None, src=0)
    answer = None if given[0] is None else _answer(given[0], do)
    store.add(f"{number}-ready", 1)
    while not store.check([f"{number}-collect"]):
        time.sleep(_PAUSE)
    if store.get(f"{number}-collect") == b"yes":
        with _group(store, f"{number}-back", rank=rank, size=size):
            dist.gather_object(answer, None, dst=0)


def _answer(job: Any, do: Callable[[Any], Any]) -> Any:
    try:
        return do(job)
    except MlflowCompressError as error:
        return _Failed(str(error))
    except Exception as error:  # whatever it is, the leader waits for an answer
        logger.warning("A job failed", exc_info=True)
        return _Failed(f"{type(error).__name__}: {error}")


def _meeting_point(*, host: bool) -> Any:
    """Return the store at the launcher's address; the leader opens it where the launcher does not."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"The environment speaks of {n_processes()} processes (WORLD_SIZE), but lacks {', '.join(missing)}",
            fix="Start them with torchrun, or unset WORLD_SIZE",
        )
    theirs = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=host and not theirs,
        wait_for_workers=False,
    )


@contextmanager
def _group(store: Any, name: str, *, rank: int, size: int) -> Iterator[None]:
    """Meet in a group of all processes, within which objects can be sent; on the CPU, wherever models run."""
    import torch.distributed as dist

    where = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    try:
        dist.init_process_group("gloo", store=where, rank=rank, world_size=size, timeout=_PATIENCE)
        yield
    except RuntimeError as error:
        raise WorkerError(
            f"Another process of this job was lost ({str(error).splitlines()[0]})", fix="Its own output says why"
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
