"""Checks the lengths in a GGUF file's header before the library reads it.

The library believes every length: with a changed one it goes on behind the end of the file for hours, and fills memory.
The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes by type
_STRING, _ARRAY = 8, 9
_SHORTEST = {_STRING: 8, _ARRAY: 12}  # bytes of an empty one
_SHORTEST_ENTRY, _SHORTEST_TENSOR = 13, 24
_MOST_DIMENSIONS, _DEEPEST = 8, 4


class _Header:
    """A place in a header, behind which a number of bytes is left."""

    def __init__(self, file: BinaryIO, left: int) -> None:
        self._file, self.left, self._order = file, left, "<"

    def skip(self, n_bytes: int) -> None:
        if n_bytes > self.left:
            raise ValueError("the file is cut off, or a length in its header is wrong")
        self._file.seek(n_bytes, 1)
        self.left -= n_bytes

    def number(self, n_bytes: int) -> int:
        if n_bytes > self.left:
            raise ValueError("the file is cut off")
        self.left -= n_bytes
        return int(struct.unpack(self._order + {4: "I", 8: "Q"}[n_bytes], self._file.read(n_bytes))[0])

    def many(self, shortest: int) -> int:
        """Return a number of entries, each of which takes `shortest` bytes or more."""
        n = self.number(8)
        if n * shortest > self.left:
            raise ValueError(f"its header counts {n:,} entries, which the file cannot hold")
        return n

    def start(self) -> None:
        if self._file.read(4) != b"GGUF":
            raise ValueError("it is no GGUF file")
        self.left -= 4
        version = self.number(4)
        if version & 0xFFFF == 0:  # a file of a machine with the other order of bytes
            self._order, version = ">", version >> 24
        if version not in (2, 3):
            raise ValueError(f"its version is {version}")

    def value(self, kind: int, depth: int = 0) -> None:
        if kind in _SCALARS:
            self.skip(_SCALARS[kind])
        elif kind == _STRING:
            self.skip(self.number(8))
        elif kind == _ARRAY and depth < _DEEPEST:
            inner = self.number(4)
            n = self.many(_SCALARS.get(inner) or _SHORTEST.get(inner, 1))
            if inner in _SCALARS:
                self.skip(n * _SCALARS[inner])
            else:
                for _ in range(n):
                    self.value(inner, depth + 1)
        else:
            raise ValueError(f"its header has a value of an unknown type, {kind}")


def check_lengths(path: Path) -> None:
    """Raise `ValueError` where a length or a count in the header does not fit into the file."""
    with path.open("rb") as file:
        header = _Header(file, path.stat().st_size)
        header.start()
        n_tensors, n_entries = header.many(_SHORTEST_TENSOR), header.many(_SHORTEST_ENTRY)
        for _ in range(n_entries):
            header.value(_STRING)
            header.value(header.number(4))
        for _ in range(n_tensors):
            header.value(_STRING)
            n_dimensions = header.number(4)
            if n_dimensions > _MOST_DIMENSIONS:
                raise ValueError(f"a tensor has {n_dimensions} dimensions")
            header.skip(8 * n_dimensions + 4 + 8)
