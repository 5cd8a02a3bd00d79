"""A file is there whole or not at all: after errors, on a full disk, after a kill.

Lock files go with the work that they guard, and keep it apart while they come and go.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mlflow_compress as mc
from mlflow_compress import files as atomic
from mlflow_compress.files import alone_with
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
    said = [process.communicate(timeout=120)[1] for process in fighting]
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
    few = {"limit": 2, "num_shuffles": 0, "noise_items": 2}
    made = mc.compress(method="rtn")
    mc.evaluate(made, **few)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with judge_server(lambda *_: (200, completion("[[5]]", "j")), model="j") as server:
        mc.judge(
            made,
            instruction_limit=2,
            max_new_tokens=4,
            judges="mt_bench",
            judge_model="j",
            judge_base_url=server.base_url,
        )
    mc.sweep(methods="rtn", bits="8", judge=False, **few)
    left = {path for path in workdir.rglob("*.lock") if "processes" not in path.parts}  # this process lives
    assert left == set()
