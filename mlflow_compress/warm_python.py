"""An interpreter that has imported what stages, or reload checks, need, and becomes the process of each by a fork.

`import torch, transformers, mlflow` takes longer than to find a result in the store, and every stage would do it again.
The fork is made from a process that has done nothing but import: it has no threads, no connection, no model, and shares
no memory with the process that asks. So what it runs is as independent as in a new interpreter.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from copy import copy
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import ClassVar, NoReturn

from mlflow_compress.lifetime import end_process

_SECONDS_BETWEEN_LOOKS = 0.02
_HEADER = 8  # bytes of a number: how long a request is, and what it has returned


class WarmPython(AbstractContextManager["WarmPython"]):
    """Starts `python -m MODULE ...` and `python FILE ...` without an interpreter's own seconds; one at a time.

    - `modules`: What is imported beforehand, while this process goes on. Within a process that was forked from such an
      interpreter with these modules, no other interpreter is started: a fork that was made before anything ran serves.
    - `later`: What is imported, or called (`module:function`), while the first thing runs, for what comes after it.
    - `environment`: Variables that are set before these are imported, besides those of this process.

    Where there is no safe fork, which is everywhere but on Linux, each is a new interpreter.
    """

    # In what was forked: the connection to a fork that was made before anything ran, and what that one has imported.
    clean: ClassVar[tuple[socket.socket, frozenset[str]] | None] = None

    def __init__(
        self,
        modules: Sequence[str],
        environment: Mapping[str, str] = MappingProxyType({}),
        *,
        later: Sequence[str] = (),
    ) -> None:
        # It need not be installed: a checkout is found too.
        path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._path = path  # of the package, before those that the user has set
        self._connection: socket.socket | None = None
        self.server: subprocess.Popen[bytes] | None = None  # a process that this one has started
        self._ended = False
        if sys.platform != "linux":
            return
        self._connection, theirs = socket.socketpair()
        with theirs:
            if self.clean is not None and self.clean[1].issuperset(modules):
                _send(self.clean[0], {"nice": 0}, [theirs.fileno()])
                return
            self.server = subprocess.Popen(
                [sys.executable, "-m", "mlflow_compress.warm_python", str(theirs.fileno()), *modules, "--", *later],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Without NVML, to ask whether there is a GPU makes it unusable in forks.
                env={**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", **environment, "PYTHONPATH": path},
            )

    def another(self, *, nice: int = 0) -> "WarmPython":
        """Return one that has imported the same, for what runs at once and is that `nice`. Ask while nothing runs."""
        other = copy(self)
        other.server, other._ended = None, False
        if self._connection is not None:
            other._connection, theirs = socket.socketpair()
            with theirs:
                _send(self._connection, {"nice": nice}, [theirs.fileno()])
        return other

    def __exit__(self, *_: object) -> None:
        """End what runs, if anything, and the interpreter. A `run` in another thread is interrupted."""
        if self._ended:
            return
        self._ended = True
        if self._connection is not None:
            self._connection.shutdown(socket.SHUT_WR)
        if self.server is not None:
            self.server.terminate()  # unless it waits for what it runs, see `serve_forks`
            self.server.wait()
        if self._connection is not None:
            while self._connection.recv(_HEADER):  # until a fork that serves it has ended
                pass
            self._connection.close()

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
        received = b""
        try:
            if self._connection is None:
                self.server = subprocess.Popen(
                    [sys.executable, *arguments],
                    cwd=folder,
                    env={**environment, "PYTHONPATH": self._path},
                    stdout=output[0],
                    stderr=output[1],
                )
                self.server.wait()
            else:
                with suppress(BrokenPipeError):  # its imports have failed
                    asked = {"arguments": list(arguments), "environment": dict(environment), "folder": str(folder)}
                    _send(self._connection, asked, output)
                received = self._connection.recv(_HEADER, socket.MSG_WAITALL)
        except KeyboardInterrupt:
            self.__exit__()
            raise
        if self._ended:
            raise KeyboardInterrupt
        if len(received) == _HEADER:
            return int.from_bytes(received, "big", signed=True)
        # Of a fork that serves, the end is not seen from here; only a kill ends it before this process does.
        return self.server.wait() if self.server is not None else -signal.SIGKILL


def _send(connection: socket.socket, asked: Mapping[str, object], files: Sequence[int]) -> None:
    text = json.dumps(asked).encode()
    socket.send_fds(connection, [len(text).to_bytes(_HEADER, "big")], files)
    connection.sendall(text)


def import_all(names: Sequence[str]) -> None:
    """Import the modules, and call the functions (`module:function`), whose results forks need."""
    gc.disable()  # nothing that is imported is garbage
    for name in names:
        module = resolve_name(name)
        if ":" in name:
            module()
    gc.freeze()  # a fork does not copy what it never looks at
    gc.enable()


def serve_forks(connection: socket.socket, later: Sequence[str] = ()) -> None:
    """Fork for every request, until the other end closes, which ends the fork. In the fork, do what was asked.

    A request without arguments brings a connection, which another fork serves.

    - `later`: What is imported or called while the first of them runs.
    """
    waiting = list(later)
    while True:
        header, files, *_ = socket.recv_fds(connection, _HEADER, 2)
        length = int.from_bytes(header, "big")
        text = connection.recv(length, socket.MSG_WAITALL)
        if len(header) < _HEADER or len(text) < length:
            return
        asked = json.loads(text)
        if (pid := os.fork()) == 0:
            connection.close()
            if "arguments" not in asked:
                os.nice(asked["nice"])
                serve_forks(socket.socket(fileno=files[0]), waiting)
                os._exit(0)
            _keep_clean_fork(files)
            for number, file in zip((1, 2), files, strict=True):
                os.dup2(file, number)
                os.close(file)

            os.environ.clear()
            os.environ.update(asked["environment"])
            os.chdir(asked["folder"])
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _become(asked["arguments"])
        for file in files:
            os.close(file)
        if "arguments" not in asked:
            continue
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ended, gone = 0, False
        while not ended:
            ended, status = os.waitpid(pid, 0 if gone else os.WNOHANG)
            if not ended and select.select([connection], [], [], 0 if waiting else _SECONDS_BETWEEN_LOOKS)[0]:
                gone = True
                os.kill(pid, signal.SIGTERM)
            elif waiting:
                import_all([waiting.pop(0)])
        if gone:
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(_HEADER, "big", signed=True))


def _keep_clean_fork(files: Sequence[int]) -> None:
    """Fork what serves a `WarmPython` in this process, before this process does anything."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        for file in (ours.detach(), *files):
            os.close(file)
        serve_forks(theirs)
        os._exit(0)
    theirs.close()
    WarmPython.clean = ours, frozenset(sys.modules)


def _become(arguments: Sequence[str]) -> NoReturn:
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
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    end_process(code)


if __name__ == "__main__":
    # Not of `__main__`: what runs in a fork imports this module.
    from mlflow_compress.warm_python import import_all, serve_forks

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the forks end themselves
    with socket.socket(fileno=int(sys.argv[1])) as _connection:
        _end = sys.argv.index("--")
        import_all(sys.argv[2:_end])
        serve_forks(_connection, sys.argv[_end + 1 :])
