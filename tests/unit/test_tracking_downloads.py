"""The cache of downloads: complete or absent, checked, bounded, and safe beside other processes."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mlflow_compress.errors import ConfigError
from mlflow_compress.tracking import artifacts as downloads
from mlflow_compress.tracking.artifacts import LIMIT_VARIABLE, Downloads, limit_bytes


@pytest.fixture(autouse=True)
def _another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "_in_use", {})


def end_use() -> None:
    """Let go of every entry, as the end of the process does."""
    for lock in downloads._in_use.values():
        lock.release()
    downloads._in_use.clear()


class Server:
    """Gives files of 100 bytes and counts the downloads."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, folder: Path) -> None:
        self.asked += 1
        (folder / "part").mkdir()
        (folder / "part" / "data").write_bytes(b"x" * 100)


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


def test_an_entry_is_downloaded_once_and_by_the_next_process_not_at_all(tmp_path: Path) -> None:
    server, cache = Server(), Downloads(tmp_path / "cache", 10_000)
    first = cache.get("a", server)
    assert (first / "part" / "data").read_bytes() == b"x" * 100
    assert cache.get("a", server) == first
    end_use()
    assert cache.get("a", server) == first and server.asked == 1


def test_a_changed_copy_is_downloaded_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server, cache = Server(), Downloads(tmp_path, 10_000)
    data = cache.get("a", server) / "part" / "data"
    end_use()
    data.write_bytes(b"y" * 100)  # the same size: only its digest tells
    assert (cache.get("a", server) / "part" / "data").read_bytes() == b"x" * 100
    assert server.asked == 2 and "was changed" in caplog.text


def test_an_interrupted_download_leaves_nothing(tmp_path: Path) -> None:
    cache = Downloads(tmp_path, 10_000)

    def broken(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise OSError("the line went dead")

    with pytest.raises(OSError, match="went dead"):
        cache.get("a", broken)
    assert entries(tmp_path) == set()
    (tmp_path / "b.partial").mkdir()  # of a process that was killed
    cache.get("a", Server())
    assert entries(tmp_path) == {"a"}


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    server, cache = Server(), Downloads(tmp_path, 250)
    for number, key in enumerate("ab"):
        cache.get(key, server)
        os.utime(tmp_path / f"{key}.json", (number, number))
    end_use()
    cache.get("a", server)  # now b is the older one
    end_use()
    cache.get("c", server)
    assert entries(tmp_path) == {"a", "c"} and server.asked == 3


def test_what_this_process_uses_stays_even_above_the_limit(tmp_path: Path) -> None:
    server, cache = Server(), Downloads(tmp_path, 150)
    for key in "abc":
        cache.get(key, server)
    assert entries(tmp_path) == {"a", "b", "c"}
    end_use()
    cache.get("d", server)
    assert entries(tmp_path) == {"d"}


def test_what_another_process_uses_stays_until_it_ends_even_killed(tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from mlflow_compress.tracking.artifacts import Downloads
        Downloads(Path(sys.argv[1]), 150).get("theirs", lambda folder: (folder / "data").write_bytes(b"x" * 100))
        print("ready", flush=True)
        time.sleep(60)
        """
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "ready\n"
            os.utime(tmp_path / "theirs.json", (0, 0))
            cache = Downloads(tmp_path, 150)
            cache.get("ours", Server())
            assert entries(tmp_path) == {"theirs", "ours"}
        finally:
            other.send_signal(signal.SIGKILL)
    cache.get("ours too", Server())
    assert entries(tmp_path) == {"ours", "ours too"}


@pytest.mark.parametrize("text", ["", "much", "0", "-1", "nan", "inf"])
def test_a_limit_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, text)
    with pytest.raises(ConfigError, match=LIMIT_VARIABLE):
        limit_bytes()


def test_the_limit_is_twenty_gigabytes_or_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    assert limit_bytes() == 20_000_000_000
    monkeypatch.setenv(LIMIT_VARIABLE, "0.5")
    assert limit_bytes() == 500_000_000
