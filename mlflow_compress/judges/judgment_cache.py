"""Judgments already paid for: an append-only JSONL file, one line per judgment."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock

from mlflow_compress.errors import DataError


def content_key(**content: Any) -> str:
    """Return the SHA-256 (hexadecimal) of everything that decides a judgment: model, messages, settings, repeat."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


class JudgmentCache:
    """Judgments by content key; each new one is on disk before `put` returns.

    A line that was being written when the process died is dropped; any other broken line is a `DataError`. Several
    processes may share the file: a lock beside it keeps their lines whole.

    Parameters
    ----------
    path : pathlib.Path or None
        The file; None keeps everything in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._rows: dict[str, dict[str, Any]] = {}
        if path is not None and path.is_file():
            self._read(path)

    def _read(self, path: Path) -> None:
        with _alone(path):
            data = path.read_bytes()
        for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
            try:
                row = json.loads(line)
                key, value = row["key"], row["value"]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"Line {number} of the judgments kept so far is broken", got=str(path), fix="Delete the file"
                ) from error
            self._rows[key] = value

    def get(self, key: str) -> dict[str, Any] | None:
        """Return what was kept under a key, or None."""
        return self._rows.get(key)

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Keep a judgment; safe from several threads."""
        with self._lock:
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with _alone(self._path), self._path.open("ab+") as sink:
                    _drop_unfinished_line(sink)
                    sink.write(json.dumps({"key": key, "value": value}).encode() + b"\n")
                    sink.flush()
                    os.fsync(sink.fileno())
            self._rows[key] = value

    def __len__(self) -> int:
        return len(self._rows)


def _alone(path: Path) -> FileLock:
    """Return the lock under which one process at a time reads or writes the file."""
    return FileLock(path.with_name(path.name + ".lock"))


def _drop_unfinished_line(file: BinaryIO) -> None:
    """Cut off what a process that died left of a line, before another line is put behind it."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
