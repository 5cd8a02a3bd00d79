"""Notices that a cluster has lost its head, or this machine. Ray itself waits for long, and then ends the process."""

from __future__ import annotations

import logging
import socket
import time
from types import ModuleType

from mlflow_compress.errors import WorkerError

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
_CONNECT_SECONDS = 2.0
_HEAD_AWAY_SECONDS = 40.0  # Ray ends the process after 60; a head that keeps its state elsewhere is back before
_HERE_AWAY_SECONDS = 0.0  # Ray ends this process, without a word, at the next thing that it wants from there


class HeadWatch:
    """Looks twice a second whether the head, and Ray's process on this machine, take connections.

    A head that is started again without a memory is another cluster, which ends what it finds on its machines. So the
    process on this machine tells both: the head was restarted, or this machine has lost its place.

    Parameters
    ----------
    ray : module
        Ray, connected.
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
        """Return if the cluster is there, or may come back.

        Raises
        ------
        WorkerError
            It is gone.
        """
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
