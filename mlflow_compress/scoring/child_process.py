"""Forks of this process that share its work."""

import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from mlflow_compress.errors import WorkerError
from mlflow_compress.lifetime import killed_by

_processes: ContextVar[int] = ContextVar("processes per pass", default=1)


def processes_per_pass() -> int:
    """Return how many forks share a pass of this process: 1 outside of `passes_in_forks`."""
    return _processes.get()


@contextmanager
def passes_in_forks() -> Iterator[None]:
    """Within this block torch has one thread, and as many forks as there are cores share each pass.

    Nothing changes where the user has set OMP_NUM_THREADS, and where forks are not safe.
    """
    import torch  # not above: those who only want to know why a process ended need not wait for it

    if sys.platform != "linux" or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    threads, before = torch.get_num_threads(), _processes.set(len(os.sched_getaffinity(0)))
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _processes.reset(before)
        torch.set_num_threads(threads)


def in_forks(work: Callable[[Any], Iterable[Any]], tasks: list[Any], processes: int) -> Iterator[Any]:
    """Yield what `work` yields for each of the tasks, in any order; each task runs in one of several forks.

    A fork has everything that this process has in memory, and takes the next task when it has finished one. What it
    yields is pickled into a pipe. An error there is raised here, and ends the others, as an interruption does.
    """
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    for task in [*range(len(tasks)), *[None] * processes]:
        queue.put(task)
    forks: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(processes):
            ours, theirs = context.Pipe(duplex=False)
            fork: BaseProcess = context.Process(target=_work, args=(theirs, queue, work, tasks), daemon=True)
            with warnings.catch_warnings():
                # Python 3.12 warns of a fork beside other threads. These take none of the locks that the forks need.
                warnings.simplefilter("ignore", DeprecationWarning)
                fork.start()
            theirs.close()
            forks[ours] = fork
        while forks:
            for connection in wait(list(forks)):
                assert isinstance(connection, Connection)
                try:
                    kind, said = connection.recv()
                except EOFError:
                    fork = forks.pop(connection)
                    fork.join()
                    if fork.exitcode:
                        killer = killed_by(fork.exitcode) or f"exit code {fork.exitcode}"
                        what = f"A process that scores was ended by {killer}"
                        raise WorkerError(what, fix="The system often sends SIGKILL when memory runs out") from None
                    continue
                if kind == "error":
                    raise said
                yield said
    finally:
        for fork in forks.values():
            fork.terminate()
            fork.join()


def _work(connection: Connection, queue: Any, work: Callable[[Any], Iterable[Any]], tasks: list[Any]) -> None:
    _processes.set(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of tokenizers do not survive a fork
    with suppress(BrokenPipeError):  # the parent has ended
        try:
            while (number := queue.get()) is not None:
                for said in work(tasks[number]):
                    connection.send(("result", said))
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001 - the parent raises it
            error.add_note(traceback.format_exc())
            connection.send(("error", error))
