"""The hidden folder in which a checkpoint is made, so that a finished one is always complete."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlflow_compress import atomic
from mlflow_compress.errors import ConfigError

_STAGING = ".partial"


def require_free(out: Path) -> None:
    """Raise `ConfigError` unless the folder is new or empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("The output folder exists and is not empty", got=str(out), fix="Give a new folder")


@contextmanager
def staging_folder(out: Path) -> Iterator[Path]:
    """Yield a hidden folder next to `out`. It is renamed to `out` on success, and removed on any failure."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=_STAGING, dir=out.parent))
    except OSError as error:
        raise ConfigError(f"The output folder cannot be written: {error}", got=str(out)) from error
    try:
        yield folder
        _set_default_permissions(folder)
        atomic.rename(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def drop_unfinished_folders(out: Path) -> None:
    """Delete what killed processes have left of a checkpoint. Nobody else may be writing it."""
    for folder in out.parent.glob(f".{glob.escape(out.name)}.*{_STAGING}"):
        shutil.rmtree(folder, ignore_errors=True)


def _set_default_permissions(folder: Path) -> None:
    """Set the permissions of ordinary new files; temporary folders and safetensors files are private by default."""
    mask = os.umask(0)
    os.umask(mask)
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
