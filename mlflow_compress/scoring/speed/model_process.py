"""The loop of a process that holds one model and times it: one JSON command a line in, one JSON reply a line out.

It is started as ``python model_process.py RUNTIME_FILE``. It needs nothing but the standard library, because some
runtimes live in an environment of their own, where this package is not installed. A runtime's file has
`open_model(command)`, which returns a `TimedModel`, and `LIBRARIES`, the modules that every model needs.
"""

import importlib
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol


class TimedModel(Protocol):
    """Interface of a model in some runtime."""

    described: dict[str, str]  # What runs it: "runtime" with its version, "device", "dtype"

    def generate(self, prompts: list[list[int]], n_new: int) -> list[float]:
        """Continue all prompts together by exactly `n_new` tokens; return the clock's time at each step's end."""

    def device_bytes(self) -> tuple[int, int]:
        """Return the bytes taken on an accelerator, now and at most; zeros where there is none."""


def serve(open_model: Callable[[dict[str, Any]], TimedModel], library_names: Sequence[str]) -> None:
    """Answer commands until the input ends.

    Libraries write to the standard output as they like. So it is turned to the standard error output, and the replies
    go to a copy of it.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    model: TimedModel | None = None
    libraries = 0
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["do"] == "open":
                for name in library_names:
                    importlib.import_module(name)
                libraries = _memory_bytes("VmRSS:")
                begin = time.perf_counter()
                model = open_model(command)
                reply: dict[str, Any] = {"load_seconds": time.perf_counter() - begin, **model.described}
            elif model is None:
                raise RuntimeError("no model is open")
            elif command["do"] == "generate":
                begin = time.perf_counter()
                ends = model.generate(command["prompts"], command["n_new"])
                reply = {"seconds": [end - begin for end in ends]}
            else:
                now, most = model.device_bytes()
                resident, peak = _memory_bytes("VmRSS:") - libraries, _memory_bytes("VmHWM:") - libraries
                reply = {"resident_bytes": resident + now, "peak_bytes": peak + most}
        except Exception as error:  # noqa: BLE001 - whatever a runtime raises is the reply; the parent makes it an error
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _memory_bytes(field: str) -> int:
    """Return the resident memory of this process, "VmRSS:", or the largest that it has had, "VmHWM:"."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    runtime = runpy.run_path(sys.argv[1])
    serve(runtime["open_model"], runtime["LIBRARIES"])
