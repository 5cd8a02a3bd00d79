"""A file is there whole or not at all: after errors, on a full disk, after a kill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlflow_compress import files as atomic

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
