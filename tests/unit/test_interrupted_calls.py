"""A signal in the middle of a call to the store: it is handled after the call, and no run stays open."""

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
from mlflow.tracking._tracking_service.utils import _get_store
from sqlalchemy import event

from mlflow_compress.lifetime import raise_on_signals, signals_later
from mlflow_compress.tracking import tracked_run
from mlflow_compress.tracking.live_processes import open_runs
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.tracking.waiting import WAIT_VARIABLE

_PLACES = 25  # of a signal in each call


pytestmark = pytest.mark.usefixtures("command_signals")


class SignalAt:
    """A profile function, which Python calls with every function that begins and ends: it signals at one of them."""

    def __init__(self, place: int) -> None:
        self.place, self.seen = place, 0

    def __call__(self, frame: FrameType, what: str, argument: Any) -> None:
        self.seen += 1
        if self.seen == self.place:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGTERM)


def no_long_wait(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> tuple[str, Any]:
    """Let SQLite say at once that it is locked; MLflow asks it to wait for 20 seconds."""
    return statement.replace("busy_timeout = 20000", "busy_timeout = 100"), parameters


def new_run(tracker: Tracker, run: TrackedRun) -> None:
    tracked_run.create_run(tracker.client, tracker.uri, tracker.experiment_id, "another", {})


@pytest.mark.parametrize(
    "call",
    [
        lambda tracker, run: tracker.client.get_run(run.run_id),
        lambda tracker, run: run.set_tags({"a": 1, "b": 2}),
        lambda tracker, run: run.log_json([1], "one.json"),
        new_run,
    ],
    ids=["read", "write", "artifact", "create"],
)
def test_wherever_a_signal_comes_the_runs_are_closed(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch, call: Callable[[Tracker, TrackedRun], object]
) -> None:
    monkeypatch.setenv(WAIT_VARIABLE, "0")
    event.listen(_get_store().engine, "before_cursor_execute", no_long_wait, retval=True)

    def interrupted_at(place: int) -> int:
        raise_on_signals()  # the first signal has switched them off
        profile = SignalAt(place)
        with tracker.run("x", "main", {}) as run:
            run.set_tags({"c": 3})
            sys.setprofile(profile)
            try:
                call(tracker, run)
            finally:
                sys.setprofile(None)
        return profile.seen

    with suppress(KeyboardInterrupt):
        interrupted_at(1)  # what is only done once
    total = interrupted_at(0)
    assert total > _PLACES
    n_interrupted = 0
    for place in range(1, total, total // _PLACES):
        try:
            assert interrupted_at(place) < place  # the call took a shorter way
        except KeyboardInterrupt:
            n_interrupted += 1
    assert n_interrupted > _PLACES / 2
    runs = tracker.client.search_runs([tracker.experiment_id])
    assert not [run for run in runs if run.info.status == "RUNNING" and run.info.run_name == "x"]
    if call is new_run:
        others = [run.info for run in runs if run.info.run_name == "another"]
        assert len([run for run in others if run.status == "KILLED"]) > _PLACES / 2
        # One was not interrupted, and a signal may come when there is a run: what is said to be open, somebody closes.
        assert {run.run_id for run in others if run.status == "RUNNING"} <= open_runs(tracker.uri)


def test_a_signal_in_the_block_is_handled_after_it_and_after_the_outermost_of_several() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt) as caught, signals_later():
        with signals_later():
            signal.raise_signal(signal.SIGTERM)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"] and caught.value.args == (signal.SIGTERM,)
    with signals_later():  # the handlers are those of before: the first signal has made them do nothing
        signal.raise_signal(signal.SIGTERM)


def test_an_error_in_the_block_gives_the_handlers_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), signals_later():
        assert signal.getsignal(signal.SIGTERM) is not before
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is before


def test_in_another_thread_the_block_does_nothing() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with signals_later():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
