"""SHA-256 of files: a large one is read once, for as long as nobody has touched it."""

import hashlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from mlflow_compress import hashes
from mlflow_compress.hashes import LEDGER, REHASH, sha256_file, sha256_files
from mlflow_compress.home import VARIABLE

LARGE = 1_500_000


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the files that are read, as they are read."""
    names: list[str] = []
    original = hashes._read
    monkeypatch.setattr(hashes, "_read", lambda path, bar: names.append(path.name) or original(path, bar))
    return names


def file_of(path: Path, byte: bytes = b"a", n_bytes: int = LARGE) -> Path:
    path.write_bytes(byte * n_bytes)
    return path


def test_equal_to_hashlib_in_the_order_of_the_files(tmp_path: Path) -> None:
    sizes = (0, 1, 999_999, 1_000_000, (1 << 20) + 1, 3 * (1 << 20))
    files = [file_of(tmp_path / f"{number}", bytes([number]), n) for number, n in enumerate(sizes)]
    wanted = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    sha256_file(files[-1])  # known before the others
    assert list(sha256_files(files).items()) == list(wanted.items())
    assert list(sha256_files(reversed(files)).items()) == list(reversed(wanted.items()))


def test_a_file_is_read_once_whatever_its_name(tmp_path: Path, read: list[str]) -> None:
    path, small = file_of(tmp_path / "a"), file_of(tmp_path / "small", n_bytes=10)
    (tmp_path / "link").symlink_to(path)
    first = sha256_file(path)
    assert [sha256_file(path), sha256_file(tmp_path / "link")] == [first, first] and read == ["a"]
    (tmp_path / "folder.partial").mkdir()
    made = file_of(tmp_path / "folder.partial" / "made")
    sha256_file(made)
    made.parent.rename(tmp_path / "folder")
    assert sha256_file(tmp_path / "folder" / "made") == first and read.pop() == "made" and read == ["a"]
    sha256_file(small), sha256_file(small)
    assert read == ["a", "small", "small"]  # to look it up would take longer


def rewritten(path: Path) -> None:
    file_of(path, b"b")


def rewritten_with_its_old_time(path: Path) -> None:
    before = path.stat()
    file_of(path, b"b")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def one_byte_in_place_with_its_old_time(path: Path) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"b")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced_by_another_file_with_its_old_time(path: Path) -> None:
    before, other = path.stat(), file_of(path.with_name("other"), b"b")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize(
    "change",
    [
        rewritten,
        rewritten_with_its_old_time,
        one_byte_in_place_with_its_old_time,
        replaced_by_another_file_with_its_old_time,
    ],
)
@pytest.mark.parametrize("new", [False, True])
def test_a_changed_file_is_noticed(
    new: bool, change: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(tmp_path / "a")
    if new:  # it changes at once, before the clock of the file system goes on
        monkeypatch.setattr(hashes, "_wait_for_next_tick", lambda file: None)
    else:
        sha256_file(path)
    sha256_file(path)
    change(path)
    assert sha256_file(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(tmp_path / "a")
    original = hashes._is_settled

    def meanwhile(file: os.stat_result) -> bool:
        answer = original(file)
        rewritten(path)
        return answer

    monkeypatch.setattr(hashes, "_is_settled", meanwhile)
    sha256_file(path)
    assert not (home / LEDGER).exists()


@pytest.mark.parametrize(("age", "nanoseconds"), [(0.0, 1), (-3600.0, 1), (1.5, 0)])
def test_what_could_change_unseen_is_not_remembered(
    age: float, nanoseconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change in the same tick of the file system's clock, a clock that is ahead, and one of whole seconds."""
    now = 1_800_000_000 * 10**9
    monkeypatch.setattr(hashes.time, "time_ns", lambda: now + nanoseconds + int(age * 1e9))
    file = type("Stat", (), {"st_ctime_ns": now + nanoseconds})()
    assert not hashes._is_settled(file)


def test_whoever_is_suspicious_has_every_file_read_again(
    tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(tmp_path / "a")
    sha256_file(path), sha256_files([path], again=True)
    monkeypatch.setenv(REHASH, "1")
    sha256_file(path)
    assert read == ["a"] * 3


def broken(home: Path) -> None:
    (home / LEDGER).write_bytes(b"no database")


def of_another_layout(home: Path) -> None:
    (home / LEDGER).unlink()
    with sqlite3.connect(home / LEDGER) as ledger:
        ledger.execute("CREATE TABLE files (name)")
    ledger.close()


def a_folder_in_its_place(home: Path) -> None:
    (home / LEDGER).unlink()
    (home / LEDGER).mkdir()


@pytest.mark.parametrize("harm", [broken, of_another_layout, a_folder_in_its_place])
def test_a_ledger_that_cannot_be_used_costs_a_reading_and_no_error(
    harm: Callable[[Path], None], tmp_path: Path, home: Path, read: list[str]
) -> None:
    path = file_of(tmp_path / "a")
    wanted = sha256_file(path)
    harm(home)
    assert [sha256_file(path), sha256_file(path)] == [wanted, wanted] and read == ["a"] * 3


def test_a_folder_that_cannot_be_made_costs_a_reading_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[str]
) -> None:
    path = file_of(tmp_path / "a")
    monkeypatch.setenv(VARIABLE, str(path / "below-a-file"))
    assert sha256_file(path) == sha256_file(path) and read == ["a", "a"]


def test_a_blob_of_the_hub_is_not_read(tmp_path: Path, read: list[str]) -> None:
    name = hashlib.sha256(b"a" * LARGE).hexdigest()
    (tmp_path / "models--org--name" / "blobs").mkdir(parents=True)
    (tmp_path / "models--org--name" / "snapshots" / "commit").mkdir(parents=True)
    blob = file_of(tmp_path / "models--org--name" / "blobs" / name)
    link = tmp_path / "models--org--name" / "snapshots" / "commit" / "model.safetensors"
    link.symlink_to(blob)
    assert sha256_file(link) == name and read == []
    assert sha256_files([link], again=True)[link] == name and read == ["model.safetensors"]
    other = tmp_path / "blobs"
    other.mkdir()
    assert sha256_file(file_of(other / name, b"b")) == hashlib.sha256(b"b" * LARGE).hexdigest()  # no cache of the hub


def test_a_bar_shows_the_progress_of_large_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hashes, "_SHOWN", LARGE)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr(hashes, "tqdm", lambda **settings: hashes_bar(**settings | {"disable": False}))
    sha256_files([file_of(tmp_path / "a"), file_of(tmp_path / "b")])
    assert "SHA-256" in capsys.readouterr().err


def hashes_bar(**settings: object) -> object:
    from tqdm import tqdm

    return tqdm(**settings)  # type: ignore[call-overload]


def test_the_ledger_knows_the_last_files(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "_MOST_FILES", 3)
    files = [file_of(tmp_path / f"{number}") for number in range(5)]
    for path in files:
        sha256_file(path)
    with sqlite3.connect(home / LEDGER) as ledger:
        known = [row[0] for row in ledger.execute("SELECT state FROM files ORDER BY rowid")]
    ledger.close()
    assert known == [hashes._state(path.stat()) for path in files[2:]]
