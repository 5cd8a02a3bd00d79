"""Waiting in tests: for what happens, never for so many seconds."""

import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def until(
    happened: Callable[[], T],
    process: subprocess.Popen[Any] | None = None,
    log: Path | None = None,
    *,
    ended: Callable[[], object] = lambda: False,
    said: Callable[[], object] = str,
) -> T:
    """Return the first value of `happened` that is true; what never happens is ended by pytest-timeout.

    - `process`, `log`: The process that makes it happen, and the file of its output; without one, its pipes are read.
    - `ended`, `said`: In place of a process, whether that which makes it happen has ended, and what it has said. Then it
      cannot happen any more, and the test fails.
    """
    if process is not None:
        ended, said = lambda: process.poll() is not None, partial(_output, process, log)
    while not (found := happened()):
        over = ended()  # asked before the last look, because it may happen just before the end
        if over and not (found := happened()):
            pytest.fail(f"It has ended, and this has not happened. It said: {said()}")
        if not found:
            time.sleep(0.01)
    return found


def _output(process: subprocess.Popen[Any], log: Path | None) -> str:
    pipes = (pipe for pipe in (process.stdout, process.stderr) if pipe is not None)
    text = log.read_text(errors="replace") if log else "\n".join(str(pipe.read()) for pipe in pipes)
    return f"{text[-5000:]} (exit code {process.returncode})"
