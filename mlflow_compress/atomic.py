"""Atomic file writes: after a crash of process or machine, a file is either complete or unchanged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Yield a binary file that becomes `path` when the block ends without an error. Otherwise `path` is unchanged.

    The content is written to ``<name>.partial`` in the same folder, synchronised to disk (fsync), and then renamed. The
    partial file of a killed process is overwritten by the next writer. So two processes must not write the same path at
    the same time.

    Raises
    ------
    OSError
        The file cannot be written, for example because the disk is full.

    Examples
    --------
    >>> with writing(Path("result.json")) as sink:  # doctest: +SKIP
    ...     sink.write(b"{}")
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as sink:
            yield sink
            sink.flush()
            os.fsync(sink.fileno())
        rename(partial, path)
    except BaseException:  # an interrupt must not leave a partial file either
        partial.unlink(missing_ok=True)
        raise


def write(path: Path, data: bytes) -> None:
    """Write a complete file atomically, see `writing`."""
    with writing(path) as sink:
        sink.write(data)


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder, and wait until the new name is synchronised to disk.

    `target` may be a file, which is replaced, or an empty folder.
    """
    source.replace(target)
    if os.name == "posix":  # other systems cannot open a folder
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
