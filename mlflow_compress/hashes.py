"""SHA-256 of files. A large file is read once: a ledger knows its hash for as long as nobody has touched it."""

import hashlib
import os
import re
import sqlite3
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path

from tqdm import tqdm

from mlflow_compress.home import home

LEDGER = "file-hashes.sqlite"
"""Name of the ledger, in the user's folder of this package: one file serves all tracking stores."""
REHASH = "MLFLOW_COMPRESS_REHASH"
"""Environment variable that lets every file be read, whatever the ledger says."""
_LARGE = 1_000_000  # smaller files are read faster than they are looked up
_SHOWN = 1_000_000_000  # from so many bytes on, a bar shows the progress
_PIECE = 1 << 20
_MOST_FILES = 10_000  # that the ledger knows: the last ones
_TICK_NS = 50_000_000  # no file system that tells fractions of a second has coarser ones
_TABLE = "CREATE TABLE IF NOT EXISTS files (state TEXT PRIMARY KEY, sha256 TEXT NOT NULL)"


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    return sha256_files([path])[path]


def sha256_files(paths: Iterable[Path], *, again: bool = False) -> dict[Path, str]:
    """Return the SHA-256 of each file's bytes, in hexadecimal; files that must be read are read side by side.

    A file is known by its device, inode, size, and the times of its last change (mtime, and ctime, which no program can
    set back), and stays known where it or a folder above it gets another name. A blob in Hugging Face's cache is named
    by its SHA-256, and is not read. A ledger that cannot be read or written costs the reading of the file, and is no
    error.

    - `again`: Read every file, whatever the ledger says.
    """
    again = again or bool(os.environ.get(REHASH))
    paths = list(paths)
    hashes: dict[Path, str] = {}
    unread: list[Path] = []
    for path in paths:
        known = None if again else _named_by_hub(path.resolve()) or _look_up(path)
        if known is None:
            unread.append(path)
        else:
            hashes[path] = known
    n_bytes = sum(path.stat().st_size for path in unread)
    shown = n_bytes >= _SHOWN
    bar = tqdm(total=n_bytes, desc="SHA-256", unit="B", unit_scale=True, disable=None, leave=False) if shown else None
    with bar or nullcontext(), ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        hashes |= zip(unread, threads.map(lambda path: _read(path, bar), unread), strict=True)
    return {path: hashes[path] for path in paths}


def _read(path: Path, bar: "tqdm[None] | None") -> str:
    """Return a file's SHA-256, and write it into the ledger if a later change of the file will be noticed."""
    before = path.stat()
    if before.st_size >= _LARGE:
        _wait_for_next_tick(before)
    settled = _is_settled(before)
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as source:
        while n := source.readinto(piece):
            digest.update(piece[:n])
            if bar is not None:
                bar.update(n)
    known = digest.hexdigest()
    if before.st_size >= _LARGE and settled and _state(before) == _state(path.stat()):
        _remember(_state(before), known)
    return known


def _wait_for_next_tick(file: os.stat_result) -> None:
    """Wait until a change of the file would get another time than its last one, where that takes an instant."""
    age = time.time_ns() - file.st_ctime_ns
    if 0 <= age < _TICK_NS:
        time.sleep((_TICK_NS - age) / 1e9)


def _is_settled(file: os.stat_result) -> bool:
    """Return whether a change from now on would get another time. Some file systems tell whole seconds, or two."""
    tick = _TICK_NS if file.st_ctime_ns % 1_000_000_000 else 2_000_000_000
    return time.time_ns() - file.st_ctime_ns >= tick


def _state(file: os.stat_result) -> str:
    return f"{file.st_dev} {file.st_ino} {file.st_size} {file.st_mtime_ns} {file.st_ctime_ns}"


def _named_by_hub(real: Path) -> str | None:
    """Return the SHA-256 that is the name of a blob in Hugging Face's cache; None for every other file."""
    folder = real.parent
    is_blob = folder.name == "blobs" and folder.with_name("snapshots").is_dir()
    return real.name if is_blob and re.fullmatch("[0-9a-f]{64}", real.name) else None


def _look_up(path: Path) -> str | None:
    file = path.stat()
    if file.st_size < _LARGE:
        return None
    try:
        with closing(sqlite3.connect(f"{_ledger().as_uri()}?mode=ro", uri=True)) as ledger:
            row = ledger.execute("SELECT sha256 FROM files WHERE state = ?", [_state(file)]).fetchone()
    except sqlite3.Error:  # there is none yet, or it is broken
        return None
    return str(row[0]) if row else None


def _remember(state: str, sha256: str) -> None:
    try:
        _ledger().parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(_ledger())) as ledger, ledger:
            ledger.execute(_TABLE)
            ledger.execute("INSERT OR REPLACE INTO files VALUES (?, ?)", [state, sha256])
            oldest = "(SELECT max(rowid) FROM files) - ?"
            ledger.execute(f"DELETE FROM files WHERE rowid <= {oldest}", [_MOST_FILES])
    except (OSError, sqlite3.Error):  # the folder cannot be written, or it is broken: the file is read again next time
        return


def _ledger() -> Path:
    return home("") / LEDGER
