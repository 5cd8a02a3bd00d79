"""A team of processes that score together: the first one leads, the others run the jobs that it sends.

`torchrun` or `accelerate launch` starts the processes. Environment variables say how many there are and at which
address they meet. The leader runs the user's command as a single process would; the others only `serve`: they poll a
key-value store at that address until the leader opens a round. In a round, the leader sends jobs in one gloo process
group, all work, and the leader collects the results in a second group. A stage that the leader starts as a process of
its own opens rounds in the leader's place. When a process is killed, the launcher ends the others.

No process group is open while a process works or waits. Libraries take an open group for a model that is distributed
over processes (compressed-tensors exchanges weights in it when a checkpoint is loaded, and waits forever), and waiting
in a group cannot be interrupted.
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

_LEADER_SET = "MLFLOW_COMPRESS_LED"  # set by the leader for the stages that it starts: they lead in its place
_ROUNDS, _END = "rounds", "end"  # keys of the store
_POLL_SECONDS = 0.1
_GROUP_TIMEOUT = timedelta(hours=1)  # a group only sends and receives

logger = logging.getLogger(__name__)
_current: Team | None = None


@dataclass(frozen=True)
class _Failed:
    """Answer of a process whose job failed."""

    text: str


class Team:
    """The processes that were started together, as their leader uses them.

    Attributes
    ----------
    size : int
        Number of processes, including the leader.
    """

    def __init__(self, store: Any, size: int) -> None:
        self._store = store
        self.size = size

    def share_out(self, jobs: Sequence[Any], own: Callable[[], T]) -> tuple[T, list[Any]]:
        """Let the other processes run the `jobs`, at most one each, and run `own` meanwhile.

        Returns
        -------
        T, list
            What `own` returned, and the result of each job, in order.

        Raises
        ------
        WorkerError
            When a job fails, with its error, or another process ends.
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
                time.sleep(_POLL_SECONDS)
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
    """Return the team that this process leads, or None outside of `leading`."""
    return _current


def n_processes() -> int:
    """Return how many processes the launcher started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def serves() -> bool:
    """Whether this process only runs the jobs of a leader."""
    return n_processes() > 1 and os.environ.get("RANK", "0") != "0"


@contextmanager
def leading() -> Iterator[None]:
    """Lead the other processes until the block ends; then they end too. With a single process, do nothing."""
    global _current
    if n_processes() == 1:
        yield
        return
    led = os.environ.get(_LEADER_SET) is not None
    store = _meeting_point(host=not led)
    os.environ[_LEADER_SET] = "1"
    _current = Team(store, n_processes())
    try:
        yield
    finally:
        _current = None
        if not led:
            del os.environ[_LEADER_SET]
            store.set(_END, "")


def serve(run: Callable[[Any], Any]) -> int:
    """Run the leader's jobs until it ends, and return the exit code. Failed jobs are reported by the leader."""
    for number in (signal.SIGINT, signal.SIGTERM):  # there is nothing to clean up, and waiting must be interruptible
        signal.signal(number, signal.SIG_DFL)
    store = _meeting_point(host=False)
    done = 0
    while True:
        try:
            if store.add(_ROUNDS, 0) > done:
                done += 1
                _take_part(store, done, run)
            elif store.check([_END]):
                return 0
            else:
                time.sleep(_POLL_SECONDS)
        except WorkerError as error:
            logger.warning("%s", error)  # the leader may still open another round
        except RuntimeError:  # the leader held the store, and has ended
            return 0


def _take_part(store: Any, number: int, run: Callable[[Any], Any]) -> None:
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), n_processes()
    given: list[Any] = [None]
    with _group(store, f"{number}-out", rank=rank, size=size):
        dist.scatter_object_list(given, None, src=0)
    answer = None if given[0] is None else _answer(given[0], run)
    store.add(f"{number}-ready", 1)
    while not store.check([f"{number}-collect"]):
        time.sleep(_POLL_SECONDS)
    if store.get(f"{number}-collect") == b"yes":
        with _group(store, f"{number}-back", rank=rank, size=size):
            dist.gather_object(answer, None, dst=0)


def _answer(job: Any, run: Callable[[Any], Any]) -> Any:
    try:
        return run(job)
    except MlflowCompressError as error:
        return _Failed(str(error))
    except Exception as error:  # any error: the leader waits for an answer
        logger.warning("A job failed", exc_info=True)
        return _Failed(f"{type(error).__name__}: {error}")


def _meeting_point(*, host: bool) -> Any:
    """Return the key-value store at the launcher's address; the leader opens it if the launcher has not."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE says that there are {n_processes()} processes, but the environment lacks {', '.join(missing)}",
            fix="Start them with torchrun, or unset WORLD_SIZE",
        )
    launcher_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=host and not launcher_has_store,
        wait_for_workers=False,
    )


@contextmanager
def _group(store: Any, name: str, *, rank: int, size: int) -> Iterator[None]:
    """Within this block, all processes are in one gloo group, which sends objects through the CPU's memory."""
    import torch.distributed as dist

    prefixed = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    try:
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=_GROUP_TIMEOUT)
        yield
    except RuntimeError as error:
        raise WorkerError(
            f"Another process of this job was lost ({str(error).splitlines()[0]})", fix="Its own output says why"
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
