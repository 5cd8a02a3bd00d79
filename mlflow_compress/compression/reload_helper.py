"""Reload checks of many checkpoints: a helper process imports the libraries once, and forks a new process per check."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_process: subprocess.Popen[str] | None = None


@contextmanager
def reload_helper() -> Iterator[None]:
    """Within this block, reload checks are forked from one helper process.

    A check is as independent as one in a process that was started for it. The helper has never loaded a model, and
    shares no memory with the process that compresses. Each check runs in a new child of the helper, which ends with it.
    Only the import of the libraries is shared. Where processes cannot fork, each check starts a process of its own.
    """
    global _process
    if _process is not None or not hasattr(os, "fork"):  # a block within a block uses the same helper
        yield
        return
    started, environment = command(["--serve"])
    _process = subprocess.Popen(
        started, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    try:
        yield
    finally:
        process, _process = _process, None
        process.kill()
        process.communicate()  # unlike Popen's own block, it closes the pipe of a helper that has ended before


def ask(folder: Path, options: list[str]) -> str | None:
    """Return what the check of a checkpoint has written; None where no helper runs."""
    if _process is None or _process.stdin is None or _process.stdout is None:
        return None
    with contextlib.suppress(BrokenPipeError):  # the helper has ended: the answer says so
        _process.stdin.write(json.dumps([str(folder), *options]) + "\n")
        _process.stdin.flush()
    answer: dict[str, Any] = json.loads(_process.stdout.readline() or '{"error": "the helper process has ended"}')
    return json.dumps(answer)


def command(options: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command of the reload check, and the environment in which it runs."""
    package_root = str(Path(__file__).parents[2])
    path = os.pathsep.join(part for part in (package_root, os.environ.get("PYTHONPATH")) if part)
    # The checkpoint is local: without network access, a request to the hub would only cost time.
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return [sys.executable, "-m", "mlflow_compress.compression.reload_check", *options], environment
