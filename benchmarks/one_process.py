"""A process of its own for jobs, one after another: what one of them breaks, the next one does not inherit."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Self

_GRACE = 10.0  # seconds that a process has to end by itself


class JobError(Exception):
    """A job failed, took too long, or ended its process."""


class OneProcess:
    """Runs jobs in one process; after a failure in a new one, because an error of CUDA spoils all later calls.

    `timeout` is in seconds a job, None is no limit; `environment` is set before anything is imported in the process.
    """

    def __init__(self, timeout: float | None, *, environment: Mapping[str, str] | None = None) -> None:
        self.timeout, self.environment = timeout, dict(environment or {})
        self._process: Any = None
        self._line: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the process: ask it by closing the line, and kill it where it does not listen."""
        if self._process is not None:
            self._line.close()
            self._process.join(_GRACE)
            self._process.kill()
            self._process.join()
            self._process = None

    def __call__(self, job: Callable[..., dict[str, Any]], *arguments: Any, **named: Any) -> dict[str, Any]:
        """Return what a job returns.

        JobError: it raises an error, takes longer than the timeout, or ends its process.
        """
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._line, other = context.Pipe()
            self._process = context.Process(target=_serve, args=(other, self.environment))
            self._process.start()
            other.close()
        self._line.send((job, arguments, named))
        try:
            if not self._line.poll(self.timeout):
                raise JobError(f"no answer after {self.timeout:.0f} s")
            kind, told = self._line.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            self.end()
            raise JobError(f"the process ended with exit code {code}") from None
        except JobError:
            self.end()
            raise
        if kind == "error":
            self.end()
            raise JobError(told)
        answer: dict[str, Any] = told
        return answer


def _serve(line: Connection, environment: dict[str, str]) -> None:
    """Do jobs until the other end closes. Reload checks are forked from one helper, as in a sweep."""
    os.environ.update(environment)
    from mlflow_compress.compression.pipeline import reload_helper

    with reload_helper():
        while True:
            try:
                job, arguments, named = line.recv()
            except EOFError:
                return
            try:
                line.send(("done", job(*arguments, **named)))
            except Exception as error:  # noqa: BLE001 - the other process decides what to do
                where = traceback.extract_tb(error.__traceback__)[-1]
                text = " ".join(f"{type(error).__name__}: {error} ({where.filename.split('/')[-1]})".split())
                line.send(("error", text[:500]))
