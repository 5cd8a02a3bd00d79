"""Cache of what endpoints have answered: an append-only JSONL file with one line per answer."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock

from mlflow_compress.errors import DataError
from mlflow_compress.files.json_text import parse_json


def content_key(**content: Any) -> str:
    """Return the SHA-256 (hexadecimal) of everything that decides an answer: model, messages, settings, repeat."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


class ReplyCache:
    """Answers by content key. A new one is on disk before `put` returns.

    A last line that is incomplete, because its process was killed, is dropped. Any other broken line is a `DataError`.
    Several processes may share the file. A lock file next to it keeps their lines complete.

    Parameters
    ----------
    path : pathlib.Path or None
        The file; None for a cache in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._rows: dict[str, dict[str, Any]] = {}
        if path is not None and path.is_file():
            self._read(path)

    def _read(self, path: Path) -> None:
        with _file_lock(path):
            data = path.read_bytes()
        for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
            row = parse_json(line, source=f"{path}, line {number}")
            if (
                not isinstance(row, dict)
                or not isinstance(row.get("key"), str)
                or not isinstance(row.get("value"), dict)
            ):
                raise DataError(f"{path}, line {number}: not a stored answer", fix="Delete the file")
            self._rows[row["key"]] = row["value"]

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the answer with a key; None if there is none."""
        return self._rows.get(key)

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Store an answer. Several threads may call this."""
        with self._lock:
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with _file_lock(self._path), self._path.open("ab+") as sink:
                    _drop_unfinished_line(sink)
                    sink.write(json.dumps({"key": key, "value": value}).encode() + b"\n")
                    sink.flush()
                    os.fsync(sink.fileno())
            self._rows[key] = value

    def values(self) -> list[dict[str, Any]]:
        """Return every answer."""
        return list(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)


def _file_lock(path: Path) -> FileLock:
    """Return the file's lock, under which only one process reads or writes."""
    return FileLock(path.with_name(path.name + ".lock"))


def _drop_unfinished_line(file: BinaryIO) -> None:
    """Remove an incomplete last line, which a killed process has left, before another line is appended."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
