"""What a machine refuses is one clear error: no space, no memory, no rights; and a clock that is set back."""

import errno
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file

from mlflow_compress.commands.main.stages import Progress
from mlflow_compress.commands.shared.get_or_create import get_or_create_run
from mlflow_compress.errors import CheckpointError, ConfigError, MachineError, machine_fault
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.folder_store import FolderStore
from mlflow_compress.tracking.store import OpenRun
from mlflow_compress.tracking.tracker import Tracker

FULL = Path("/dev/full")  # refuses every write as a full disk does
MUCH = 1 << 50  # bytes that no machine has


def full_disk() -> None:
    with FULL.open("w") as sink:
        sink.write("x" * 100_000)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(full_disk, "No space left", marks=pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")),
        pytest.param(
            lambda: save_file({"a": torch.zeros(100_000)}, "/nowhere/at/all/a.safetensors"), None, id="no folder"
        ),
        (lambda: torch.empty(MUCH), "not enough memory for another 4503599627370496 bytes"),  # of 4 bytes each
        (lambda: np.zeros(MUCH), "not enough memory for another 8.00 PiB"),
        (lambda: pa.allocate_buffer(MUCH), "not enough memory for another 1125899906842624 bytes"),
        (lambda: int("x"), None),
        (lambda: Path("/nowhere/at/all").read_text(), None),  # a missing file is no fault of the machine
    ],
)
def test_faults_of_the_machine_are_told_from_others(fault: Callable[[], object], words: str | None) -> None:
    with pytest.raises(Exception) as raised:
        fault()
    found = machine_fault(raised.value)
    if words is None:
        assert found is None
    else:
        assert found is not None and words in str(found)


def test_a_librarys_own_words_are_read() -> None:
    class SafetensorError(Exception):
        __module__ = "safetensors_rust"

    found = machine_fault(SafetensorError("I/O error: No space left on device (os error 28)"))
    assert found is not None and "Free disk space" in str(found)
    assert machine_fault(RuntimeError("os error 28 is what a user's text says")) is None


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EFBIG, errno.EDQUOT, errno.EMFILE, errno.EIO])
def test_the_path_and_a_way_out_are_named(number: int) -> None:
    found = machine_fault(OSError(number, "x", "/data/out"))
    assert found is not None and "Got: '/data/out'" in str(found) and len(str(found).split(". ")) == 3


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "There is not enough memory. Got"),
        (ImportError("libx.so: failed to map segment from shared object: Cannot allocate memory"), "device=balanced"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "ulimit -u"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0"), "memory for another 2.00 GiB"),
        (ImportError("No module named 'x'"), None),
    ],
)
def test_the_systems_words_for_no_memory_are_known(raised: Exception, words: str | None) -> None:
    found = machine_fault(raised)
    assert found is None if words is None else words in str(found)


def test_a_model_that_memory_has_no_room_for_is_not_called_broken() -> None:
    def load(reason: Exception) -> CheckpointError:
        broken = CheckpointError("The checkpoint cannot be loaded")
        broken.__cause__ = reason
        return broken

    found = machine_fault(load(RuntimeError("DefaultCPUAllocator: can't allocate memory: tried to allocate 8 bytes")))
    assert found is not None and "for another 8 bytes" in str(found) and "The checkpoint cannot be loaded" in str(found)
    assert machine_fault(found) is None  # it is clear already
    assert machine_fault(load(ValueError("no such architecture"))) is None
    assert machine_fault(CheckpointError("out of memory")) is None


@pytest.fixture(params=["mlflow", "folder"])
def store(request: pytest.FixtureRequest, workdir: Path) -> Tracker | FolderStore:
    return Tracker() if request.param == "mlflow" else FolderStore(workdir / "results")


def test_a_run_on_a_full_disk_fails_with_that_error(store: Tracker | FolderStore) -> None:
    with pytest.raises(MachineError, match="No space left"), store.run("x", "quantize", {}):
        raise OSError(errno.ENOSPC, "x", "/data/out")
    assert store.find("quantize") == []


def test_errors_of_ours_stay_what_they_are(store: Tracker | FolderStore) -> None:
    with pytest.raises(ConfigError, match="wrong"), store.run("x", "quantize", {}):
        raise ConfigError("wrong")


def test_a_clock_that_is_set_back_loses_nothing(store: Tracker | FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()

    def work(run: OpenRun, folder: Path, resume: Path) -> None:
        monkeypatch.setattr(time, "time", lambda: now - 86_400)
        (folder / "records").mkdir()
        (folder / "records" / "a").write_text("1")

    first, fresh = get_or_create_run(store, "baseline", "demo", {"a": 1}, work)
    again, fresh_again = get_or_create_run(store, "baseline", "demo", {"a": 1}, work)
    assert (fresh, fresh_again, first) == (True, False, again)
    assert (store.fetch(first, "records") / "a").read_text() == "1"


def test_no_estimate_comes_from_a_run_during_which_the_clock_was_set_back(tracker: Tracker) -> None:
    said: list[str] = []
    with tracker.run("x", "evaluate", {run_names.BASE_MODEL: "demo"}) as run:
        pass
    tracker.client.set_terminated(run.run_id, "FINISHED", end_time=1000)
    Progress(tracker, "demo", said.append).begin("evaluate", 1, 1)
    assert "no estimate" in said[0]
