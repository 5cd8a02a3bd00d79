"""Slows down each process whose PYTHONPATH names this folder, as `SLOW_MACHINE` says; Python imports it first.

For `tools/test_slow_machine.sh`. A test that gives a process another PYTHONPATH runs that one at full speed.
"""

import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any


class SlowImport:
    """Finds no module, but takes 3 s to look for our package: once in each process, and so once in each fork."""

    process = 0

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "mlflow_compress" and self.process != os.getpid():
            self.process = os.getpid()
            time.sleep(3)


def slowed(call: Callable[..., Any], sleep: Callable[[float], None]) -> Callable[..., Any]:
    """Return what takes 50 ms more."""

    def slow(*arguments: Any, **options: Any) -> Any:
        sleep(0.05)
        return call(*arguments, **options)

    return slow


if os.environ.get("SLOW_MACHINE") == "imports":
    sys.meta_path.insert(0, SlowImport())
elif os.environ.get("SLOW_MACHINE") == "sleep":
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(3 * seconds)
    for name in ("connect", "recv", "recv_into"):
        setattr(socket.socket, name, slowed(getattr(socket.socket, name), sleep))
