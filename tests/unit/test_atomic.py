"""A file is there whole or not at all: after errors, on a full disk, after a kill.

Lock files go with the work that they guard, and keep it apart while they come and go.
"""

import errno
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file

import mlflow_compress as mc
from mlflow_compress import files as atomic
from mlflow_compress.commands.main.stages import Progress
from mlflow_compress.commands.shared.get_or_create import get_or_create_run
from mlflow_compress.errors import CheckpointError, ConfigError, MachineError, machine_fault
from mlflow_compress.files import alone_with
from mlflow_compress.models.model_files import library_errors
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker
from tests.judge_server import completion, judge_server
from tests.judging import KEY

PACKAGE = Path(atomic.__file__).parent


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"first", b"", b"second and longer"):
        atomic.write(path, data)
        assert path.read_bytes() == data
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("before", [None, b"before"])
def test_an_error_leaves_what_was_there(tmp_path: Path, error: type[BaseException], before: bytes | None) -> None:
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    with pytest.raises(error), atomic.writing(path) as sink:
        sink.write(b"half")
        raise error
    assert [p.read_bytes() for p in tmp_path.iterdir()] == ([] if before is None else [before])


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    # /dev/full refuses every write as a full disk does.
    (tmp_path / "file.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        atomic.write(path, b"after")
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"before"


def test_the_content_is_on_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, replace = os.fsync, Path.replace

    def fsync(handle: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "content")  # noqa: PTH112
        sync(handle)

    def rename(source: Path, target: Path) -> Path:
        done.append("rename")
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", rename)
    atomic.write(tmp_path / "file", b"data")
    assert done == ["content", "rename", "folder"]


def test_a_killed_writer_leaves_what_was_there_and_the_next_one_tidies_up(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic.write(path, b"before")
    killed = (
        "import os, pathlib, signal, sys; from mlflow_compress import files as atomic\n"
        "with atomic.writing(pathlib.Path(sys.argv[1])) as sink:\n"
        "    sink.write(b'half'); sink.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    assert subprocess.run([sys.executable, "-c", killed, str(path)], env=environment, check=False).returncode == -9
    assert path.read_bytes() == b"before" and (tmp_path / "file.partial").read_bytes() == b"half"
    atomic.write(path, b"after")
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"after"


def test_a_folder_is_published_whole(tmp_path: Path) -> None:
    made, target = tmp_path / ".made", tmp_path / "target"
    made.mkdir()
    (made / "file").write_bytes(b"data")
    target.mkdir()
    atomic.rename(made, target)
    assert [p.name for p in tmp_path.iterdir()] == ["target"] and (target / "file").read_bytes() == b"data"


def test_nothing_else_brings_files_to_the_disk_by_itself() -> None:
    others = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if "os.fsync" in p.read_text()}
    assert others == {"files.py", "transport/replies.py"}  # replies are lines added to one file


# The folder can be made by one process only. Nothing is left of it, so that each round can fail.
_ROUNDS = """
import os, sys
from pathlib import Path
from mlflow_compress.files import alone_with

for _ in range(int(sys.argv[1])):
    with alone_with(Path("work.lock")):
        os.mkdir("alone")
        count = int(Path("count").read_text())
        Path("count").write_text(str(count + 1))
        os.rmdir("alone")
"""


def test_processes_that_fight_for_a_lock_that_is_deleted_are_alone(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    command = [sys.executable, "-c", _ROUNDS, "100"]
    fighting = [subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate()[1] for process in fighting]
    assert [process.returncode for process in fighting] == [0] * 4, said
    assert (tmp_path / "count").read_text() == "400"
    assert [path.name for path in tmp_path.iterdir()] == ["count"]


def test_who_does_not_wait_is_told(tmp_path: Path) -> None:
    lock = tmp_path / "work.lock"
    with pytest.raises(RuntimeError), alone_with(lock) as first, alone_with(lock, wait=False) as second:
        assert first and not second and lock.exists()
        raise RuntimeError
    assert not lock.exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_lock_stays_behind(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"limit": 2, "num_shuffles": 0, "task_args": {"noise_items": 2}}
    made = mc.compress(method="rtn")
    mc.evaluate(made, **few)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with judge_server(lambda *_: (200, completion("[[5]]", "j")), model="j") as server:
        mc.judge(
            made,
            answer_args={"instruction_limit": 2, "max_new_tokens": 4},
            judges="mt_bench",
            judge_model="j",
            judge_args={"base_url": server.base_url},
        )
    mc.sweep(methods="rtn", bits="8", judge=False, **few)
    left = {path for path in workdir.rglob("*.lock") if "processes" not in path.parts}  # this process lives
    assert left == set()


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


def test_a_thread_that_does_not_start_under_a_limit_on_memory_lacks_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda what: (10**9, 10**9))
    rust = type("PanicException", (BaseException,), {})(
        "The global thread pool has not been initialized.: kind: IOError"
    )
    for raised in (RuntimeError("can't start new thread"), rust):
        found = machine_fault(raised)
        assert found is not None and "There is not enough memory" in str(found)
    with pytest.raises(MemoryError), library_errors("The tokenizer cannot be read", "model"):
        raise rust


def test_after_a_lack_of_memory_only_other_faults_of_the_end_are_shown() -> None:
    """torch's last words import a table's package, which may be the next that has no room."""
    program = """
import atexit, sys
from mlflow_compress import cli
def raised(error):
    raise error
atexit.register(raised, ValueError("another fault"))
atexit.register(raised, MemoryError())
cli._answer = lambda *_: raised(MemoryError())
sys.exit(cli.main(["list", "methods"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    first, *rest = done.stderr.splitlines()
    assert done.returncode == 1 and first.startswith("mlflow-compress: There is not enough memory")
    assert rest[-1] == "ValueError: another fault" and "MemoryError" not in "".join(rest)


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


def test_a_run_on_a_full_disk_fails_with_that_error_and_errors_of_ours_stay_what_they_are(
    tracker: Tracker,
) -> None:
    with pytest.raises(MachineError, match="No space left"), tracker.run("x", "quantize", {}):
        raise OSError(errno.ENOSPC, "x", "/data/out")
    assert tracker.find("quantize") == []
    with pytest.raises(ConfigError, match="wrong"), tracker.run("x", "quantize", {}):
        raise ConfigError("wrong")


def test_a_clock_that_is_set_back_loses_nothing(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 2e9
    monkeypatch.setattr(time, "time", lambda: now)

    def work(run: TrackedRun, folder: Path, resume: Path) -> None:
        monkeypatch.setattr(time, "time", lambda: now - 86_400)
        (folder / "records").mkdir()
        (folder / "records" / "a").write_text("1")

    first, fresh = get_or_create_run(tracker, "baseline", "demo", {"a": 1}, work)
    again, fresh_again = get_or_create_run(tracker, "baseline", "demo", {"a": 1}, work)
    assert (fresh, fresh_again, first) == (True, False, again)
    assert (tracker.fetch(first, "records") / "a").read_text() == "1"


def test_no_estimate_comes_from_a_run_during_which_the_clock_was_set_back(tracker: Tracker) -> None:
    said: list[str] = []
    with tracker.run("x", "evaluate", {run_names.BASE_MODEL: "demo"}) as run:
        pass
    tracker.client.set_terminated(run.run_id, "FINISHED", end_time=1000)
    Progress(tracker, "demo", said.append).begin("evaluate", 1, 1)
    assert "no estimate" in said[0]


def test_what_the_failed_work_held_is_freed_before_the_error_is_said() -> None:
    """Otherwise nothing is left for the message: the frames behind an error hold the weights that did not fit."""

    class Weights: ...

    loaded = []

    def load() -> None:
        weights = Weights()
        loaded.append(weakref.ref(weights))
        with library_errors("The checkpoint cannot be loaded", "model"):
            raise MemoryError

    with pytest.raises(MemoryError) as raised:  # no file is at fault, and none is searched for one
        load()
    assert loaded[0]() is not None
    assert "There is not enough memory" in str(machine_fault(raised.value)) and loaded[0]() is None
