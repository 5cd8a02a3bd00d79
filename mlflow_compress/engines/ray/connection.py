"""The connection to Ray: a cluster of this machine alone, started here, or one that runs."""

import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from mlflow_compress.config import EngineConfig
from mlflow_compress.errors import ConfigError, WorkerError, require_extra

_TOKEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")
_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_SECONDS = 10.0
_SHORT = 40  # characters of a temporary folder: Ray makes sockets in it, whose paths must not exceed 107


@contextmanager
def connected(settings: EngineConfig) -> Iterator[ModuleType]:
    """Yield the module `ray` while this process is connected to a cluster.

    Where the process is connected already, that connection is used, and stays.
    """
    if settings.ray_address is None:
        # Ray's own switch, read when it is imported: raylet, gcs_server, workers and this process listen on 127.0.0.1,
        # where Ray would otherwise open them to the network. It is the default on macOS, hence the name.
        os.environ.setdefault(_CLUSTERS, "0")
    require_extra("ray", "ray", by="engine=ray")
    import ray

    if ray.is_initialized():
        yield ray
        return
    logging.getLogger("ray").setLevel(logging.ERROR)  # otherwise it says more than the command itself
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    folder = tempfile.gettempdir()
    scratch = tempfile.mkdtemp(prefix="ray-", dir=folder if len(folder) <= _SHORT else "/tmp")
    try:
        with _own_signals():
            if settings.ray_address is None:
                if not any(os.environ.get(name) for name in _TOKEN):
                    # Without this, Ray makes a token and writes it into the user's home.
                    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
                ray.init(
                    address="local",  # not the cluster that RAY_ADDRESS names: it was not asked for
                    num_cpus=cores(),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=scratch,
                )
            else:
                _join(ray, settings.ray_address)
        yield ray
    finally:
        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)  # a daemon of Ray may still write its last lines


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _join(ray: ModuleType, address: str) -> None:
    """Connect to a cluster that runs."""
    try:
        known = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
        if known != "auto" and "://" not in known:
            host, port = known.rsplit(":", 1)
            socket.create_connection((host, int(port)), timeout=_SECONDS).close()  # Ray itself waits for ever
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, OverflowError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"No Ray cluster answers: {str(error).strip().splitlines()[0]}",
            allowed="'auto' on a machine of a running cluster, or host:port of its head",
            got=address,
            fix="It wants its token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to the cluster's"
            if "AuthToken" in str(error.__cause__)
            else "Start one with `ray start --head`, or leave ray_address out",
        ) from error


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's own handlers: Ray replaces that of SIGTERM, and then no open run would be closed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
_CONNECT_SECONDS = 2.0
_HEAD_AWAY_SECONDS = 40.0  # Ray ends the process after 60; a head that keeps its state elsewhere is back before
_HERE_AWAY_SECONDS = 0.0  # Ray ends this process, without a word, at the next thing that it wants from there


class HeadWatch:
    """Looks twice a second whether the head, and Ray's process on this machine, take connections.

    A head that is started again without a memory is another cluster, which ends what it finds on its machines. So the
    process on this machine tells both: the head was restarted, or this machine has lost its place.
    """

    def __init__(self, ray: ModuleType) -> None:
        context = ray.get_runtime_context()
        host, port = context.gcs_address.rsplit(":", 1)
        [here] = [node for node in ray.nodes() if node["NodeID"] == context.get_node_id()]
        self._places = {
            "The head of the Ray cluster": ((host, int(port)), _HEAD_AWAY_SECONDS),
            "Ray's process on this machine": (
                (here["NodeManagerAddress"], int(here["NodeManagerPort"])),
                _HERE_AWAY_SECONDS,
            ),
        }
        self._silent_since: dict[str, float] = {}
        self._next_look = 0.0

    def check(self) -> None:
        """Return if the cluster is there, or may come back."""
        now = time.monotonic()
        if now < self._next_look:
            return
        for name, (address, patience) in self._places.items():
            if _answers(address):
                self._silent_since.pop(name, None)
                continue
            if patience and name not in self._silent_since:
                logger.warning("%s does not answer; waiting for it, at most %.0f s", name, patience)
            if now - self._silent_since.setdefault(name, now) >= patience:
                raise WorkerError(
                    f"{name} does not answer any more",
                    got=":".join(map(str, address)),
                    fix="Start the cluster again, then the same command: it goes on with what is on disk",
                )
        self._next_look = time.monotonic() + _LOOK_SECONDS


def _answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
