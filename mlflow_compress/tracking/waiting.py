"""Calls to a tracking store that is away for a while: repeated, with growing pauses, until it answers again."""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from mlflow.exceptions import MlflowException
from requests.exceptions import ChunkedEncodingError, ConnectionError, RetryError, Timeout

from mlflow_compress.errors import ConfigError, MlflowCompressError, StoreAwayError, TrackingError
from mlflow_compress.lifetime import signals_later

WAIT_VARIABLE = "MLFLOW_COMPRESS_SERVER_WAIT"
_DEFAULT_WAIT_S = 600.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_BUSY = ("database is locked", "database table is locked")  # what SQLite says of a store that others write to

_UNAVAILABLE = "TEMPORARILY_UNAVAILABLE"  # MLflow's word for whatever a database has raised

_VARIABLE = re.compile(r"\bMLFLOW_[A-Z_]+")

T = TypeVar("T")

logger = logging.getLogger(__name__)


def longest_wait() -> float:
    """Return for how many seconds a store is waited for: ``MLFLOW_COMPRESS_SERVER_WAIT``, 600 if it is not set."""
    text = os.environ.get(WAIT_VARIABLE, str(_DEFAULT_WAIT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise ConfigError(f"{WAIT_VARIABLE} must be a number of seconds", allowed="0 or more", got=text)
    return seconds


def outage(error: BaseException, uri: str) -> str | None:
    """Return in a few words why a store did not answer; None where it did answer, and has refused."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RetryError):
            return "it answers with server errors"
        if isinstance(seen, Timeout):
            return "it takes too long to answer"
        if isinstance(seen, ConnectionError | ChunkedEncodingError):
            return "no connection"
        if isinstance(seen, MlflowException) and seen.error_code == _UNAVAILABLE:
            if not uri.startswith("sqlite:"):
                return "its database does not answer"
            return "others write to it" if any(busy in str(seen) for busy in _BUSY) else None
        seen = seen.__cause__ or seen.__context__
    return None


def away(uri: str, reason: str) -> StoreAwayError:
    """Return the error of a store that was waited for in vain."""
    return StoreAwayError(
        f"The tracking server has not answered ({reason}) for {longest_wait():.0f} s",
        got=shown_store(uri),
        fix="Computed results are saved on this machine. When the server is back, repeat the command, or use "
        f"`mlflow-compress resume`, to do the rest. {WAIT_VARIABLE} sets how many seconds to wait",
    )


def shown_store(uri: str) -> str:
    """Return a store's address without user and password."""
    scheme, separator, rest = uri.partition("://")
    place, slash, path = rest.partition("/")
    return f"{scheme}{separator}{place.rpartition('@')[2]}{slash}{path}"


@contextmanager
def store_errors(what: str, uri: str) -> Iterator[None]:
    """Within this block MLflow opens a store as its environment says; what it raises is a `TrackingError`.

    It raises whatever its code, that of SQLAlchemy and that of requests meet in an address or in a variable. Only such
    calls belong into the block.

    - `what`: The beginning of the sentence: "The tracking store cannot be used".
    """
    try:
        yield
    except MlflowCompressError:
        raise
    except Exception as error:
        said = next(iter(str(error).splitlines()), "") or type(error).__name__
        fix = "Set MLFLOW_TRACKING_URI to a store that can be written, such as sqlite:///mlflow.db"
        if isinstance(error, ImportError):
            fix = "Install the package of that database: for PostgreSQL, pip install 'mlflow-compress[postgresql]'"
        elif variable := _VARIABLE.search(said):
            fix = f"Correct the environment variable {variable[0]}, or unset it"
        raise TrackingError(f"{what}: {said}", got=shown_store(uri), fix=fix) from error


class PatientClient:
    """An MLflow client whose every call waits for a store that is away, see `wait_for`. `impatient` is plain.

    A call to a database is not interrupted, but whoever waits for it is.
    """

    def __init__(self, client: Any, uri: str) -> None:
        self.impatient, self.uri = client, uri
        self._given_up = False  # it was waited for in vain: nothing waits for it a second time
        self._interrupted = False
        self._signals = nullcontext if uri.startswith(("http", "databricks")) else signals_later

    def __getattr__(self, name: str) -> Any:
        """Return the client's method of this name, made patient."""
        method = getattr(self.impatient, name)
        return lambda *args, **kwargs: self.wait_for(lambda: method(*args, **kwargs))

    def hurry(self) -> None:
        """From now on, wait for nothing: this process was interrupted, and only closes its runs."""
        self._interrupted = True

    def wait_for(self, call: Callable[[], T], *, made: Callable[[], T | None] | None = None, long: bool = False) -> T:
        """Return what a call returns. While the store does not answer, the call is repeated, and the user is told.

        A call that makes something new each time needs `made`, which returns what was made where the answer was lost
        (None if nothing was). If the store does not answer for `longest_wait` seconds, this is a `StoreAwayError`.
        Whoever calls next is told so at once, without another wait, until it answers again.

        - `long`: It copies files, does not ask the database, and can be interrupted.
        """
        began: float | None = None
        pause = _FIRST_PAUSE_S
        while True:
            try:
                with nullcontext() if long else self._signals():
                    earlier = made() if made is not None and began is not None else None
                    answer = call() if earlier is None else earlier
            except Exception as error:
                reason = outage(error, self.uri)
                if reason is None:
                    if isinstance(error, MlflowException) and error.error_code == _UNAVAILABLE:
                        raise TrackingError(
                            f"The tracking store cannot be used: {str(error).splitlines()[0]}",
                            got=shown_store(self.uri),
                            fix="See to it that this user may write there, and that the disk has room; then start the "
                            "same command again",
                        ) from None
                    if isinstance(error, ValueError) and _VARIABLE.search(str(error)):  # MLflow cannot read it
                        with store_errors("The tracking store cannot be used", self.uri):
                            raise
                    raise
                began = time.monotonic() if began is None else began
                left = began + longest_wait() - time.monotonic()
                if left <= 0 or self._given_up or self._interrupted:
                    self._given_up = True
                    raise away(self.uri, reason) from None
                if pause == _FIRST_PAUSE_S:
                    logger.warning(
                        "Waiting for the tracking server %s (%s), at most %.0f s", shown_store(self.uri), reason, left
                    )
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                if began is not None:
                    logger.warning("The tracking server answers again, after %.0f s", time.monotonic() - began)
                self._given_up = False
                return answer

    def once(self, make: Callable[[Any], T], made: Callable[[Any], T | None]) -> T:
        """Return what `make` makes, which must not be made twice where the answer to the first call was lost.

        `made` finds what an earlier call has made, if anything. Both are called with the plain client.
        """
        return self.wait_for(lambda: make(self.impatient), made=lambda: made(self.impatient))
