"""What is known of a process that has ended."""

from __future__ import annotations

import subprocess
from typing import IO, Any


def exit_reason(process: subprocess.Popen[Any], errors: IO[bytes]) -> str:
    """Return the exit code of an ended process, and the last line that it wrote to its file of errors."""
    code = process.wait()
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f"its process ended with code {code}: {lines[-1] if lines else 'no reason given'}"
