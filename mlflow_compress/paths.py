"""Parameters that name files and folders: made absolute, or refused with the folder that they were looked for in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

from mlflow_compress.config import Command, parameters
from mlflow_compress.config.declarations import path_kind
from mlflow_compress.errors import ConfigError

C = TypeVar("C", bound=Command)

_SUFFIXES = (".jsonl", ".txt", ".gguf")  # no data set, task or hub id that we know of ends so
_ALWAYS = ("data_dir",)  # parameters that nothing but a path can be

STARTED_IN = "MLFLOW_COMPRESS_STARTED_IN"
"""Environment variable that tells stages, which run in folders of their own, where the main job was started."""


def absolute_paths(config: C) -> C:
    """Return the configuration with every path made absolute, since stages run in other working folders.

    A value that names no file or folder stays as it is where it may be a name or a hub id.

    Raises
    ------
    ConfigError
        A value that can only be a path (it begins with `.`, `~` or `/`, ends in .jsonl, .txt or .gguf, or has more
        parts than a hub id) and is none.
    """
    changed: dict[str, Any] = {}
    values = config.values()
    for name, field in parameters(type(config)).items():
        kind, value = path_kind(field), values[name]
        if kind == "files":
            changed[name] = ",".join(_absolute(name, part.strip(), "file") for part in value.split(","))
        elif kind and value:
            changed[name] = _absolute(name, value, kind)
    return config.with_values(**changed)


def _absolute(name: str, value: str, kind: str) -> str:
    path = Path(value).expanduser()
    # A folder that happens to have the name of a set is not what a file parameter means, and so the other way round.
    if (kind != "folder" and path.is_file()) or (kind != "file" and path.is_dir()):
        return str(path.resolve())
    if name in _ALWAYS or value.startswith((".", "~", "/")) or path.suffix in _SUFFIXES or _too_deep(value, kind):
        what = {"file": "file", "folder": "folder"}.get(kind, "file or folder")
        raise ConfigError(f"Parameter '{name}' names no {what}", got=value, fix=_where(path))
    return value


def _too_deep(value: str, kind: str) -> bool:
    """Return whether a model's name has more parts than a hub id's two."""
    return kind in ("folder", "either") and value.count("/") > 1


def started_in() -> str:
    """Return the folder in which relative paths were looked for: that of the main job, whichever stage asks."""
    return os.environ.get(STARTED_IN) or str(Path.cwd())


def _where(path: Path) -> str:
    """Return where a path that is not there was looked for."""
    if path.is_absolute():
        return "There is nothing of this kind under this name"
    if "MLFLOW_RUN_ID" in os.environ:
        return f"MLflow starts projects in their own folder, and there it was looked for: {started_in()}. Give it whole"
    return f"It was looked for in the working folder, {started_in()}"
