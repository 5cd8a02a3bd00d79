"""A lease on a piece of work, kept by the tracking server: one process of all machines has it at a time."""

import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from mlflow.exceptions import MlflowException

from mlflow_compress.errors import StoreAwayError, TrackingError
from mlflow_compress.tracking.experiment import every_page
from mlflow_compress.tracking.live_processes import alive_here
from mlflow_compress.tracking.waiting import PatientClient

logger = logging.getLogger(__name__)

PREFIX = "mlflow.compress-lease."  # MLflow's UI does not show experiment tags that begin with "mlflow."
_BEAT_S = 10.0
_LOOK_S = 3.0  # between two looks of a process that waits
_SILENT_LOOKS = 20  # without a beat, about a minute


class Lease:
    """The right to do one piece of work, among all processes that use one tracking server.

    A lease is a tag of an experiment: its value names the holder, and changes every ten seconds. A process that sees no
    lease on the work writes one, and then looks again: where several have written at once, all of them withdraw, and
    try again after a random pause. A process that waits takes the next number when every holder is gone:

    - A holder on this machine is gone when its process is, which `alive_here` sees at the next look. A process that is
      starved, or stopped, keeps its lease, however long it is silent.
    - Any other holder is gone when 20 looks have seen no new beat. Only looks on time count: those at most ten seconds,
      which is a beat, after the look before. A later one shows that this machine is starved, or that the server was
      away. So the holder gets as many chances to beat as this process has had to look. A process that is never on
      time waits until the holder's machine, which sees its dead processes, gives the lease back.

    So clocks are never compared, the clock of the day is never read, and a dead holder needs no hand.
    """

    def __init__(self, client: PatientClient, experiment_id: str, key: str, holder: str) -> None:
        self._client, self._experiment_id, self._holder = client, experiment_id, holder
        self._stem = f"{PREFIX}{key}."
        self._tag = ""
        self._lost = threading.Event()
        self._stop = threading.Event()
        self._beats: threading.Thread | None = None

    def acquire(self) -> None:
        seen: dict[str, tuple[str, int]] = {}  # by tag: its value, and how many looks on time have seen it unchanged
        told = False
        last_look = time.monotonic()
        while True:
            leases, before, seen = self._all(), seen, {}
            now = time.monotonic()
            on_time, last_look = now - last_look <= _BEAT_S, now
            for tag, (_, value) in leases.items():
                value_before, looks = before.get(tag, ("", 0))
                seen[tag] = value, looks + on_time if value == value_before else 0
            held = {tag for tag, (value, looks) in seen.items() if not self._is_gone(value, looks)}
            if not held and self._take(leases):
                self._beats = threading.Thread(target=self._beat, name="lease", daemon=True)
                self._beats.start()
                return
            if not told and held & before.keys():  # seen once may be one that is withdrawn
                logger.warning("Another process evaluates the same baseline; waiting for it")
                told = True
            time.sleep(_LOOK_S * random.uniform(0.5, 1.5))

    def _is_gone(self, value: str, silent_looks: int) -> bool:
        alive = alive_here(self._client.uri, value.partition(" ")[0])
        return silent_looks >= _SILENT_LOOKS if alive is None else not alive

    def _all(self) -> dict[str, tuple[str, str]]:
        """Return the experiment and the value of every lease on this work, by its tag."""
        return {tag: rest for tag, rest in _leases(self._client).items() if tag.startswith(self._stem)}

    def _number(self, tag: str) -> int:
        return int(tag.removeprefix(self._stem).partition(".")[0])

    def _take(self, dead: dict[str, tuple[str, str]]) -> bool:
        """Return whether this process got the lease. Those of dead holders are then deleted."""
        number = max(map(self._number, dead), default=-1) + 1
        self._tag = f"{self._stem}{number}.{uuid.uuid4().hex[:12]}"
        try:
            self._client.set_experiment_tag(self._experiment_id, self._tag, f"{self._holder} 0")
        except MlflowException as error:
            self._tag = ""
            raise TrackingError(f"The tracking server refuses a lease: {str(error).splitlines()[0]}") from error
        # Whoever writes later sees this tag. So of several processes at most one sees no other.
        if self._all().keys() - dead.keys() - {self._tag}:
            _delete(self._client, self._experiment_id, self._tag)
            return False
        for tag, (experiment_id, _) in dead.items():
            _delete(self._client, experiment_id, tag)
        return True

    def _beat(self) -> None:
        """Show other processes that this one lives, until the lease is given back or lost."""
        number = 0
        client = self._client.impatient
        while not self._stop.wait(_BEAT_S):
            number += 1
            with suppress(MlflowException):  # a server that is away cannot be asked by others either
                if self._tag not in client.get_experiment(self._experiment_id).tags:
                    self._lost.set()
                    return
                client.set_experiment_tag(self._experiment_id, self._tag, f"{self._holder} {number}")

    def confirm(self) -> None:
        """Refuse to go on where another process has taken the lease, because this one was cut off for too long."""
        leases = self._all()
        newest = max(map(self._number, leases), default=-1)
        if self._lost.is_set() or self._tag not in leases or newest > self._number(self._tag):
            raise TrackingError(
                "This process was cut off from the tracking server for so long that another one does its work now",
                fix="Repeat the command: it reuses what the other one stores",
            )

    def release(self) -> None:
        """Give the lease back. Where that is not possible now, a thread does it later, if this process lives on."""
        self._stop.set()
        if self._beats is not None:
            self._beats.join(timeout=_BEAT_S)
        if not self._tag:  # interrupted before it wrote one
            return
        try:
            _delete(self._client, self._experiment_id, self._tag)
        except BaseException:
            threading.Thread(target=self._release_later, name="lease", daemon=True).start()
            raise

    def _release_later(self) -> None:
        while True:
            with suppress(MlflowException):
                _delete(self._client.impatient, self._experiment_id, self._tag)
                return
            time.sleep(_BEAT_S)


@contextmanager
def leased(client: PatientClient, experiment_id: str, key: str, holder: str) -> Iterator[Callable[[], None]]:
    """Hold the lease on a piece of work within the block, which gets `Lease.confirm`."""
    lease = Lease(client, experiment_id, key, holder)
    try:
        lease.acquire()
        yield lease.confirm
    finally:
        with suppress(StoreAwayError):
            lease.release()


def give_back_leases(client: PatientClient, holders: set[str]) -> None:
    """Delete the leases of processes that have died."""
    for tag, (experiment_id, value) in _leases(client).items():
        if value.partition(" ")[0] in holders:
            _delete(client, experiment_id, tag)


def _leases(client: PatientClient) -> dict[str, tuple[str, str]]:
    """Return the experiment and the value of every lease, by its tag."""
    leases: dict[str, tuple[str, str]] = {}
    for experiment in every_page(client.search_experiments):
        tags = experiment.tags.items()
        leases |= {tag: (experiment.experiment_id, value) for tag, value in tags if tag.startswith(PREFIX)}
    return leases


def _delete(client: Any, experiment_id: str, tag: str) -> None:
    try:
        client.delete_experiment_tag(experiment_id, tag)
    except MlflowException as error:  # another process has taken the lease over and deleted it
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
