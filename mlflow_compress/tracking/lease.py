"""A lease on a piece of work, kept by the tracking server: one process of all machines has it at a time."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from mlflow.exceptions import MlflowException

from mlflow_compress.errors import StoreAwayError, TrackingError
from mlflow_compress.tracking.waiting import PatientClient

logger = logging.getLogger(__name__)

PREFIX = "mlflow-compress-lease-"
HOLDER = "holder"  # tag of a lease: the process that has it, see `live_processes`
_BEAT = "beat"  # tag of a lease: a number that its holder changes all the time
_BEAT_S = 10.0
_LOOK_S = 3.0  # between two looks of a process that waits
_DEAD_AFTER_S = 60.0  # without a beat
_ABOUT = "Held while a baseline is evaluated, so that no other process evaluates it too. It goes when the work ends."


class Lease:
    """The right to do one piece of work, among all processes that use one tracking server.

    A lease is a registered model, because a server makes one name once: of several processes that ask for it together,
    one gets it. The holder changes a tag of it all the time. A process that waits, and sees no change for
    60 seconds of its own clock, takes the next number. So clocks are never compared, and a dead holder needs no hand.

    Parameters
    ----------
    client : PatientClient
        Client of the server.
    key : str
        Names the work: letters and digits.
    holder : str
        Name of this process.
    """

    def __init__(self, client: PatientClient, key: str, holder: str) -> None:
        self._client, self._holder = client, holder
        self._stem = f"{PREFIX}{key}-"
        self._name = ""
        self._lost = threading.Event()
        self._stop = threading.Event()
        self._beats: threading.Thread | None = None

    def acquire(self) -> None:
        """Wait until this process has the lease."""
        unchanged: dict[int, tuple[str, float, float]] = {}  # by number: beat, when first and last seen with it
        told = False
        while True:
            there = self._all()
            unchanged = {number: _seen(unchanged.get(number), beat) for number, beat in there.items()}
            live = [n for n, (_, first, last) in unchanged.items() if last - first < _DEAD_AFTER_S]
            if not live and self._take(max(there, default=-1) + 1, set(there)):
                self._beats = threading.Thread(target=self._beat, name="lease", daemon=True)
                self._beats.start()
                return
            if live and not told:
                logger.warning("Another process evaluates the same baseline; waiting for it")
                told = True
            time.sleep(_LOOK_S * random.uniform(0.8, 1.2))

    def _all(self) -> dict[int, str]:
        """Return the beat of every lease on this work, by its number."""
        found: dict[int, str] = {}
        token = None
        while True:
            page = self._client.search_registered_models(f"name LIKE '{self._stem}%'", page_token=token)
            for model in page:
                found[int(model.name.removeprefix(self._stem))] = f"{model.tags.get(HOLDER)} {model.tags.get(_BEAT)}"
            token = page.token
            if not token:
                return found

    def _take(self, number: int, dead: set[int]) -> bool:
        """Return whether this process got the lease of this number. Those of dead holders are then deleted."""
        name = f"{self._stem}{number}"
        try:
            self._client.create_registered_model(name, tags={HOLDER: self._holder, _BEAT: "0"}, description=_ABOUT)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise TrackingError(f"The registry refuses a lease: {str(error).splitlines()[0]}") from error
            if self._client.get_registered_model(name).tags.get(HOLDER) != self._holder:  # else the answer was lost
                return False  # another process was faster
        self._name = name
        # A holder may have ended, and another one begun with number 0, between the look and this. Then both step back.
        if self._all().keys() - dead - {number}:
            self._delete(name)
            return False
        for other in dead:
            self._delete(f"{self._stem}{other}")
        return True

    def _delete(self, name: str) -> None:
        try:
            self._client.delete_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise

    def _beat(self) -> None:
        """Show other processes that this one lives, until the lease is given back or lost."""
        number = 0
        while not self._stop.wait(_BEAT_S):
            number += 1
            try:
                self._client.impatient.set_registered_model_tag(self._name, _BEAT, str(number))
            except MlflowException as error:  # a server that is away cannot be asked by others either
                if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                    self._lost.set()
                    return

    def confirm(self) -> None:
        """Refuse to go on where another process has taken the lease, because this one was cut off for too long."""
        if self._lost.is_set() or self._name.removeprefix(self._stem) not in map(str, self._all()):
            raise TrackingError(
                "This process was cut off from the tracking server for so long that another one does its work now",
                fix="Start the same command again: it finds what the other one stores",
            )

    def release(self) -> None:
        """Give the lease back."""
        self._stop.set()
        if self._beats is not None:
            self._beats.join(timeout=_BEAT_S)
        self._delete(self._name)


@contextmanager
def leased(client: PatientClient, key: str, holder: str) -> Iterator[Callable[[], None]]:
    """Hold the lease on a piece of work within the block, which gets `Lease.confirm`."""
    lease = Lease(client, key, holder)
    lease.acquire()
    try:
        yield lease.confirm
    finally:
        with suppress(StoreAwayError):  # it ends by itself
            lease.release()


def _seen(before: tuple[str, float, float] | None, beat: str) -> tuple[str, float, float]:
    """Return a lease's beat with the first and the last moment at which this process saw it.

    Where the last look is long ago, the server was away. Then the holder could not beat either, and gets its full time.
    """
    now = time.monotonic()
    if before is None or before[0] != beat or now - before[2] > _DEAD_AFTER_S / 2:
        return beat, now, now
    return beat, before[1], now


def leases_of(client: PatientClient, holders: set[str]) -> list[str]:
    """Return the names of the leases that these processes hold."""
    found: list[str] = []
    token = None
    while True:
        page = client.search_registered_models(f"name LIKE '{PREFIX}%'", page_token=token)
        found += [str(model.name) for model in page if model.tags.get(HOLDER) in holders]
        token = page.token
        if not token:
            return found
