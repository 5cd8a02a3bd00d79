"""Waiting in tests: for what happens, never for so many seconds."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def until(happened: Callable[[], T], process: subprocess.Popen[Any] | None = None, log: Path | None = None) -> T:
    """Return the first value of `happened` that is true; what never happens is ended by pytest-timeout.

    - `process`: The process that makes it happen. Where it ends without, the test fails with the end of its output.
    - `log`: The file of its output; without one, its pipes are read.
    """
    while not (found := happened()):
        if process is not None and process.poll() is not None:
            if found := happened():  # the last thing that it did
                return found
            pipes = (pipe for pipe in (process.stdout, process.stderr) if pipe is not None)
            said = log.read_text(errors="replace") if log else "\n".join(str(pipe.read()) for pipe in pipes)
            raise AssertionError(f"the process ended with code {process.returncode}: {said[-5000:]}")
        time.sleep(0.01)
    return found
