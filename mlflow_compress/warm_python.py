"""An interpreter that has imported what stages, or reload checks, need, and becomes the process of each by a fork.

`import torch, transformers, mlflow` takes longer than to find a result in the store, and every stage would do it again.
The fork is made from a process that has done nothing but import: it has no threads, no connection, no model, and shares
no memory with the process that asks. So what it runs is as independent as in a new interpreter.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

_SECONDS_BETWEEN_LOOKS = 0.02
_HEADER = 8  # bytes of a number: how long a request is, and what it has returned


class WarmPython(AbstractContextManager["WarmPython"]):
    """Starts `python -m MODULE ...` and `python FILE ...` without an interpreter's own seconds; one at a time.

    - `modules`: What is imported beforehand, while this process goes on.
    - `environment`: Variables that are set before these are imported, besides those of this process.

    Where there is no safe fork, which is everywhere but on Linux, each is a new interpreter.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})) -> None:
        # It need not be installed: a checkout is found too.
        path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._connection: socket.socket | None = None
        self._path = path  # of the package, before those that the user has set
        if sys.platform != "linux":
            return
        self._connection, theirs = socket.socketpair()
        with theirs:
            self.server = subprocess.Popen(
                [sys.executable, "-m", "mlflow_compress.warm_python", str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Without NVML, to ask whether there is a GPU makes it unusable in forks.
                env={**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", **environment, "PYTHONPATH": path},
            )

    def __exit__(self, *_: object) -> None:
        """End what runs, if anything, and the interpreter."""
        if self._connection is not None:
            self._connection.close()
            self.server.terminate()  # unless it waits for what it runs, see `_serve`
            self.server.wait()

    def run(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path,
        output: tuple[int, int] = (1, 2),
    ) -> int:
        """Run Python with these arguments in a folder, and return its exit code, or minus the signal that ended it.

        - `output`: Open files for its standard output and its standard error.

        If this process is interrupted meanwhile, the other one is ended first, and no more can be run.
        """
        if self._connection is None:
            out, err = output
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                env={**environment, "PYTHONPATH": self._path},
                stdout=out,
                stderr=err,
            )
            try:
                return process.wait()
            except KeyboardInterrupt:
                process.terminate()
                process.wait()
                raise
        asked = {"arguments": list(arguments), "environment": dict(environment), "folder": str(folder)}
        text = json.dumps(asked).encode()
        try:
            with suppress(BrokenPipeError):  # its imports have failed
                socket.send_fds(self._connection, [len(text).to_bytes(_HEADER, "big")], output)
                self._connection.sendall(text)
            received = self._connection.recv(_HEADER, socket.MSG_WAITALL)
        except KeyboardInterrupt:
            self.__exit__()
            raise
        return int.from_bytes(received, "big", signed=True) if len(received) == _HEADER else self.server.wait()


def _serve(connection: socket.socket) -> None:
    """Fork for every request, until the other end closes, which ends the fork. In the fork, do what was asked."""
    while True:
        header, files, *_ = socket.recv_fds(connection, _HEADER, 2)
        length = int.from_bytes(header, "big")
        text = connection.recv(length, socket.MSG_WAITALL)
        if len(header) < _HEADER or len(text) < length:
            return
        asked = json.loads(text)
        if (pid := os.fork()) == 0:
            connection.close()
            for number, file in zip((1, 2), files, strict=True):
                os.dup2(file, number)
                os.close(file)
            os.environ.clear()
            os.environ.update(asked["environment"])
            os.chdir(asked["folder"])
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _become(asked["arguments"])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for file in files:
            os.close(file)
        ended, gone = 0, False
        while not ended:
            ended, status = os.waitpid(pid, 0 if gone else os.WNOHANG)
            if not ended and select.select([connection], [], [], _SECONDS_BETWEEN_LOOKS)[0]:
                gone = True
                os.kill(pid, signal.SIGTERM)
        if gone:
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(_HEADER, "big", signed=True))


def _become(arguments: Sequence[str]) -> NoReturn:
    """Do what `python *arguments` does, and end.

    Python would then take apart every module, and so copy the memory that it shares with the process that it was forked
    from: two seconds, for nothing. What is registered for the end of a process is done.
    """
    code: object = 0
    try:
        if arguments[0] == "-m":
            sys.argv[:], sys.path[0] = arguments[1:], str(Path.cwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:], sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:  # noqa: BLE001 - the process ends with it
        traceback.print_exc()
        code = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the forks end themselves
    with socket.socket(fileno=int(sys.argv[1])) as _connection:
        for _module in sys.argv[2:]:
            import_module(_module)
        _serve(_connection)
