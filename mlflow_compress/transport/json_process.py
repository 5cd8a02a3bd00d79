"""A process that answers a line of JSON with a line of JSON, behind which come as many bytes as its `n_bytes` says."""

import json
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

_SECONDS_TO_END = 20.0


class JsonProcess:
    """Starts such a process, with the arguments of `subprocess.Popen`. It ends when nobody refers to it any more."""

    ended: ClassVar[str] = "its process ended"  # How an error begins that says so

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, **options)
        self.end = weakref.finalize(self, _end, self.process)

    def ask(self, question: Mapping[str, Any] | None) -> tuple[dict[str, Any], bytes]:
        """Return the answer, and its bytes; of a process that has ended, the `error`. None reads its first line."""
        assert self.process.stdin is not None and self.process.stdout is not None
        answer: dict[str, Any] = {}
        raw = b""
        try:
            with suppress(BrokenPipeError):  # the answer gives the reason
                if question is not None:
                    self.process.stdin.write(json.dumps(question).encode() + b"\n")
                    self.process.stdin.flush()
            if line := self.process.stdout.readline():
                answer = json.loads(line)
                raw = self.process.stdout.read(answer.get("n_bytes", 0))
        except ValueError:  # it was ended while it answered, which closes its output
            answer = {}
        if not answer or len(raw) != answer.get("n_bytes", 0):
            return {"error": self._exit_reason()}, b""
        return answer, raw

    def _exit_reason(self) -> str:
        """Return the exit code of the ended process, and the last line of what it wrote to its standard error."""
        code = self.process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"{self.ended} with code {code}: {lines[-1] if lines else 'no reason given'}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process by closing its input; one that does not end is killed."""
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with suppress(BrokenPipeError):
            stream.close()
    try:
        process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
