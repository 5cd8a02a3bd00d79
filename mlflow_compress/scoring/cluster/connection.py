"""The connection to Ray: a cluster of this machine alone, started here, or one that runs."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from mlflow_compress.config import EngineConfig
from mlflow_compress.errors import ConfigError, MissingDependencyError

_TOKEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")
_SECONDS = 10.0
_SHORT = 40  # characters of a temporary folder: Ray makes sockets in it, whose paths must not exceed 107


@contextmanager
def connected(settings: EngineConfig) -> Iterator[ModuleType]:
    """Yield the module `ray` while this process is connected to a cluster.

    Where the process is connected already, that connection is used, and stays.

    Raises
    ------
    MissingDependencyError
        Ray is not installed.
    ConfigError
        No cluster answers at the address.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(
            "engine=ray needs the package ray", fix="pip install 'mlflow-compress[ray]'"
        ) from error
    if ray.is_initialized():
        yield ray
        return
    logging.getLogger("ray").setLevel(logging.ERROR)  # otherwise it says more than the command itself
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    scratch = tempfile.mkdtemp(prefix="ray-", dir=_short_folder())
    try:
        with _own_signals():
            if settings.ray_address is None:
                _start(ray, scratch)
            else:
                _join(ray, settings.ray_address)
        yield ray
    finally:
        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)  # a daemon of Ray may still write its last lines


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(ray: ModuleType, scratch: str) -> None:
    """Start a cluster on this machine, which ends with this process."""
    if not any(os.environ.get(name) for name in _TOKEN):
        # Its ports are open to the network. Without this, Ray makes a token and writes it into the user's home.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    ray.init(
        num_cpus=cores(), include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, _temp_dir=scratch
    )


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


def _short_folder() -> str:
    folder = tempfile.gettempdir()
    return folder if len(folder) <= _SHORT else "/tmp"


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
