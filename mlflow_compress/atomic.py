"""Files that are there whole or not at all, also after a crash of the process or of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Give a binary file that becomes `path` when the block ends well; after an error `path` is as it was before.

    The content is written to ``<name>.partial`` in the same folder, brought to the disk (fsync) and then renamed. The
    next writer overwrites what a killed process leaves of it, so two processes must not write one path at a time.

    Raises
    ------
    OSError
        The disk refuses, for example because it is full.

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
    except BaseException:  # an interrupt, too, must not leave half a file
        partial.unlink(missing_ok=True)
        raise


def write(path: Path, data: bytes) -> None:
    """Write a whole file by `writing`."""
    with writing(path) as sink:
        sink.write(data)


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder, and wait until the new name is on the disk.

    `target` may be a file, which is replaced, or an empty folder.
    """
    source.replace(target)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
