"""Makes parameters that are paths absolute. Refuses missing paths, and names the folder that was searched."""

import os
from pathlib import Path
from typing import Any, TypeVar

from mlflow_compress.config import ENDPOINT, Parameters, is_endpoint, parameters
from mlflow_compress.config.declarations import named, path_kind
from mlflow_compress.errors import ConfigError
from mlflow_compress.transport.endpoint import check_served_address

C = TypeVar("C", bound=Parameters)

# No known data set, task or hub id ends like this.
_SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".gguf", ".yaml", ".yml")
_ALWAYS = ("data_dir", "offload_dir")  # parameters that are always paths

STARTED_IN = "MLFLOW_COMPRESS_STARTED_IN"
"""Environment variable with the folder in which the main job was started, for its stages in other folders."""


def absolute_paths(config: C) -> C:
    """Return the configuration with absolute paths, because stages run in other working folders.

    A value without such a file or folder is unchanged if it may be a name or a hub id.
    """
    changed: dict[str, Any] = {}
    values = config.values()
    for name, field in parameters(type(config)).items():
        kind, value = path_kind(field), values[name]
        what = named(name, field)
        if kind == "files" and value:
            changed[name] = ",".join(_absolute(name, part.strip(), "file", what) for part in value.split(","))
        elif kind and value:
            changed[name] = _absolute(name, value, kind, what)
    return config.with_values(**changed)


def _absolute(name: str, value: str, kind: str, what: str) -> str:
    if kind != "file" and is_endpoint(value):
        check_served_address(name, value.removeprefix(ENDPOINT))
        return value
    before, option, file = value.partition("?documents=")  # as in long:16k?documents=FILE
    if kind == "file" and option:
        return f"{before}{option}{_absolute(name, file, kind, what)}"
    reader, colon, file = value.partition(":")
    if kind == "file" and colon and len(reader) > 1 and reader.replace("-", "").isalpha():  # as in openai:FILE
        return value if reader == "mlflow-traces" else f"{reader}:{_absolute(name, file, kind, what)}"
    path = Path(value).expanduser()
    # For a file parameter, a folder of that name is ignored: the value may be the name of a set. And the reverse.
    if (kind != "folder" and path.is_file()) or (kind not in ("file", "program") and path.is_dir()):
        return str(path.absolute() if kind == "program" else path.resolve())
    too_deep = kind in ("folder", "either") and value.count("/") > 1  # a hub id has two parts
    if name in _ALWAYS or value.startswith((".", "~", "/")) or path.suffix in _SUFFIXES or too_deep:
        sought = {"file": "file", "folder": "folder", "program": "file"}.get(kind, "file or folder")
        raise ConfigError(f"{what} names no {sought}", got=value, fix=_where(path))
    return value


def started_in() -> str:
    """Return the folder in which relative paths are searched: that of the main job, also in its stages."""
    return os.environ.get(STARTED_IN) or str(Path.cwd())


def is_stage() -> bool:
    """Return whether the main job has started this process."""
    return STARTED_IN in os.environ


def _where(path: Path) -> str:
    """Return a sentence that says where a missing path was searched."""
    if path.is_absolute():
        return "There is nothing of this kind under this name"
    if "MLFLOW_RUN_ID" in os.environ:
        return (
            f"It was looked for in {started_in()}, the folder in which MLflow starts the project. Give an absolute path"
        )
    return f"It was looked for in the working folder, {started_in()}"
