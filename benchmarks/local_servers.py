"""A tracking server and a PostgreSQL of this machine's own, which benchmarks and slow tests start and kill."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class TrackingServer:
    """`mlflow server` with artifacts through the server. It can be killed and started again at the same address.

    Artifacts and log go into `folder`; `store` is the URI of the database behind it.
    """

    def __init__(self, folder: Path, store: str, workers: int = 1) -> None:
        self.uri = f"http://127.0.0.1:{free_port()}"
        self._folder, self._store, self._workers = folder, store, workers
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        port = self.uri.rpartition(":")[2]
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", port]
        command += ["--workers", str(self._workers), "--backend-store-uri", self._store]
        command += ["--serve-artifacts", "--artifacts-destination", str(self._folder / "artifacts")]
        environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
        self._log = (self._folder / "server.log").open("ab")
        self._process = subprocess.Popen(
            command, cwd=self._folder, stdout=self._log, stderr=self._log, env=environment, start_new_session=True
        )
        while not self.answers():
            if self._process.poll() is not None:
                raise RuntimeError(f"mlflow server does not start: see {self._folder / 'server.log'}")
            time.sleep(0.1)

    def answers(self) -> bool:
        """Return whether it can be reached now."""
        try:
            urllib.request.urlopen(f"{self.uri}/health").close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """End it and its workers at once, as a power cut does."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> "TrackingServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def postgres_folder() -> Path | None:
    """Return the folder of PostgreSQL's programs; None where it is not installed."""
    found = shutil.which("postgres")
    candidates = [Path(found).resolve().parent] if found else []
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((path for path in candidates if (path / "initdb").exists()), None)


@contextmanager
def postgres() -> Iterator[str]:
    """Start a PostgreSQL with an empty database, and give its SQLAlchemy URI. It ends, and its data go, with the block.

    PostgreSQL refuses to be run by root. Then it runs as the user `postgres`, whom its package has made.
    """
    programs = postgres_folder()
    if programs is None:
        raise RuntimeError("PostgreSQL is not installed (Debian: apt install postgresql)")
    user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    try:
        if user:
            shutil.chown(folder, "postgres", "postgres")
        data, port = folder / "data", free_port()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
        initdb = [programs / "initdb", "-D", data, "-U", "mlflow", "-A", "trust", "-E", "UTF8", "--no-sync"]
        subprocess.run(initdb, check=True, **quiet, **user)
        options = ["-p", str(port), "-c", "listen_addresses=127.0.0.1", "-k", folder, "-c", "fsync=off"]
        with subprocess.Popen([programs / "postgres", "-D", data, *options], **quiet, **user) as process:
            try:
                ready = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
                while subprocess.run(ready, check=False, **quiet).returncode:
                    if process.poll() is not None:
                        raise RuntimeError("PostgreSQL does not start")
                    time.sleep(0.1)
                yield f"postgresql+psycopg2://mlflow@127.0.0.1:{port}/postgres"
            finally:
                process.send_signal(signal.SIGINT)  # fast shutdown: open connections are closed
                process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
