"""A process that has imported what commands need, and starts each command as a fork of itself.

Most of a small command's processor time goes into imports. A fork has them behind it. It is a process with a session,
signals and an exit of its own, as one from a shell has.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

_IMPORTED = (
    "torch",
    "transformers",
    "llmcompressor",
    "matplotlib.pyplot",
    "mlflow",
    "mlflow_compress.compression.servers",
    "mlflow_compress.judges.judge_registry",
    "mlflow_compress.commands.evaluate.run",
    "mlflow_compress.commands.judge.run",
    "mlflow_compress.commands.main.summary",
    "mlflow_compress.commands.promote.run",
    "mlflow_compress.commands.quantize.run",
    "mlflow_compress.commands.sweep.run",
)


class Forks:
    """The process that commands are forked from; it ends with the block."""

    def __enter__(self) -> "Forks":
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._ask("ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def _ask(self, *words: object) -> int:
        """Send one line, and return the number that comes back."""
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, arguments: list[str], folder: Path, environment: dict[str, str], log: Path) -> "Forked":
        """Start a command in a folder, with this environment; what it says goes to `log`."""
        return Forked(self._ask("start", arguments, str(folder), environment, str(log)), self)

    def ended(self, pid: int) -> int | None:
        """Return the exit code of a command, a signal as a negative number; None while it runs."""
        code = self._ask("ended", pid)
        return None if code == _RUNS else code


class Forked:
    """A command that was forked."""

    def __init__(self, pid: int, forks: Forks) -> None:
        self.pid, self._forks = pid, forks
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        if self.returncode is None:
            self.returncode = self._forks.ended(self.pid)
        return self.returncode


_RUNS = 1000  # no exit code


def _run(arguments: list[str], folder: str, environment: dict[str, str], log: str) -> int:
    """Run a command as `python -m mlflow_compress` does, in the child of a fork."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the folder of the new environment
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(sink, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    from mlflow_compress.cli import main

    return main(arguments)


def _serve() -> int:
    """Answer the lines of `Forks`; in a child, return the command's exit code."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for name in _IMPORTED:
        import_module(name)
    for line in sys.stdin:
        asked, *rest = json.loads(line)
        answer = 0
        if asked == "start":
            answer = os.fork()
            if answer == 0:
                answers.close()
                return _run(*rest)
        elif asked == "ended":
            pid, status = os.waitpid(rest[0], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else _RUNS
        print(answer, file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(_serve())
