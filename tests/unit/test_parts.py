"""Seconds by part: nested functions, threads, forks, and the functions that are named."""

import importlib
import os
import sys
import threading
from pathlib import Path

import pytest

from benchmarks import parts


class Steps:
    """A clock that is moved by hand: seconds, and twice as many processor seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> tuple[float, float]:
        return self.seconds, 2 * self.seconds

    def go_on(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def clock(tmp_path: Path, steps: Steps) -> parts.Clock:
    return parts.Clock(tmp_path, steps)


def test_a_part_has_the_seconds_outside_of_the_parts_that_it_calls(
    clock: parts.Clock, steps: Steps, tmp_path: Path
) -> None:
    read = clock.wrapped("hash", lambda: steps.go_on(4))

    def load() -> None:
        steps.go_on(1)
        read()
        steps.go_on(2)

    steps.go_on(50)  # in no part
    clock.wrapped("load", load)()
    read()
    found = parts.read(tmp_path)
    assert found.pop("load") == (3.0, 6.0)
    assert found.pop("hash") == (8.0, 16.0)
    assert set(found.values()) == {(0.0, 0.0)}


def test_an_error_ends_a_part_and_other_threads_are_in_none(clock: parts.Clock, steps: Steps, tmp_path: Path) -> None:
    def fail() -> None:
        steps.go_on(1)
        raise ValueError

    with pytest.raises(ValueError):
        clock.wrapped("load", fail)()
    steps.go_on(10)
    thread = threading.Thread(target=clock.wrapped("items", lambda: steps.go_on(100)))
    thread.start()
    thread.join()
    clock.wrapped("hash", lambda: steps.go_on(2))()
    found = parts.read(tmp_path)
    assert [found[name][0] for name in ("load", "items", "hash")] == [1.0, 0.0, 2.0]


@pytest.mark.parametrize("helps", [False, True])
def test_a_fork_counts_for_itself_and_a_helper_with_processor_seconds_alone(
    clock: parts.Clock, steps: Steps, tmp_path: Path, *, helps: bool
) -> None:
    def work() -> None:
        clock.wrapped("passes", lambda: steps.go_on(3))()

    def shared() -> None:
        steps.go_on(1)
        if (pid := os.fork()) == 0:
            try:
                (clock.as_helper(work) if helps else work)()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)

    clock.wrapped("passes", shared)()
    # Its own clock stands still while it waits for the fork.
    assert parts.read(tmp_path)["passes"] == ((1.0 if helps else 4.0), 8.0)


def test_a_function_is_changed_before_others_take_it_and_one_that_is_not_there_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, folder = tmp_path / "measured_package", tmp_path / "found"
    folder.mkdir()
    (package / "scoring").mkdir(parents=True)
    (package / "hashes.py").write_text("def sha256_files(): return 7\n")
    (package / "scoring" / "baseline_store.py").write_text(
        "class StateWriter:\n    def take(self): return 8\n    def _own(self): return 9\n"
        "class StateStore:\n    @classmethod\n    def open(cls): return cls\n"
    )
    (package / "taker.py").write_text(
        "from measured_package.hashes import sha256_files\n"
        "from measured_package.scoring.baseline_store import StateStore, StateWriter\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seconds = iter(range(100))
    monkeypatch.setattr(parts, "now", lambda: (float(next(seconds)), 0.0))
    parts.install(folder, "measured_package")
    taker = importlib.import_module("measured_package.taker")
    assert taker.sha256_files() == 7
    assert parts.read(folder)["hash"] == (1.0, 0.0)
    assert taker.StateWriter().take() == 8
    assert taker.StateWriter()._own() == 9
    assert taker.StateStore.open() is taker.StateStore
    assert parts.read(folder)["states"] == (2.0, 0.0)
    missing = sorted(file.name for file in folder.glob("missing-*"))
    assert missing == [
        f"missing-measured_package.scoring.baseline_store:StateStore.{name}" for name in ("rows_of", "states")
    ]


@pytest.mark.parametrize(
    "place", [*(place for several in parts.PARTS.values() for place in several), parts.WAITING, parts.HELPER]
)
def test_every_function_that_is_measured_is_there(place: str) -> None:
    module, _, inside = place.partition(":")
    owner = importlib.import_module(f"mlflow_compress.{module}")
    *classes, name = inside.split(".")
    for one in classes:
        owner = vars(owner)[one]
    assert name == "*" or name in vars(owner)
