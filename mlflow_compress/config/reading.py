"""Parameters from text and from files, and back to text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from mlflow_compress.config.declarations import NONE, Command, as_typed, parameters
from mlflow_compress.config.old_names import renamed
from mlflow_compress.config.validation_errors import unknown_parameter
from mlflow_compress.errors import ConfigError
from mlflow_compress.files.yaml_text import read_yaml

C = TypeVar("C", bound=Command)

_NAME_BYTES, _PATH_BYTES = 255, 4095  # longest name of a file or folder, longest path
_PROSE = ("system_prompt", "reason")  # parameters that are neither names nor paths


def parse(cls: type[C], values: Mapping[str, Any]) -> C:
    """Return the configuration of a command, from text or Python values by name.

    Parameters
    ----------
    cls : type
        A command.
    values : mapping
        Parameters by flat name; those left out keep their defaults. "config" names a YAML file with more of them,
        before which what is given here goes.

    Raises
    ------
    ConfigError
        Unknown name (with the nearest known one), a value of the wrong type, outside its choices or below its bound, or
        one that can be no name.
    """
    known = parameters(cls)
    given = dict(values)
    file = given.pop("config", NONE)
    given = renamed(given, known)
    if str(file) not in ("", NONE):
        given = {**renamed(read_file(Path(str(file))), known), **given}
    for name, value in given.items():
        if name not in known:
            raise unknown_parameter(name, list(known))
        if isinstance(value, str) and name not in _PROSE:
            check_text(name, value)
    return cls(**given)


def read_file(path: Path, *, parameter: str = "config") -> dict[str, Any]:
    """Return the values of a YAML file, by name; one that cannot be read, or holds no names, is a `ConfigError`.

    `parameter` is the one that names the file.
    """
    content = read_yaml(path, parameter=parameter)
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        what = f"The file of parameter '{parameter}' holds no names"
        raise ConfigError(what, allowed="lines of 'name: value'", got=str(path))
    return content


def as_text(config: Command) -> dict[str, str]:
    """Return every parameter as the text that `parse` reads back."""
    return {name: as_typed(value) for name, value in config.values().items()}


def check_text(name: str, text: str) -> None:
    """Refuse what no file system and no hub has a name for, before something is looked up by it.

    Parameters
    ----------
    name : str
        The parameter.
    text : str
        Its value: names, paths, or several of them separated by commas.

    Raises
    ------
    ConfigError
        For a NUL character, and for a path, or a name in it, that is longer than file systems allow.
    """
    if "\0" in text:
        raise ConfigError(f"Parameter '{name}' holds a NUL character", got=text[:_NAME_BYTES])
    for most, separators in ((_NAME_BYTES, "[/,]"), (_PATH_BYTES, ",")):
        n_bytes = max(len(part.encode()) for part in re.split(separators, text))
        if n_bytes > most:
            what = "name" if most == _NAME_BYTES else "path"
            raise ConfigError(
                f"Parameter '{name}' holds a {what} that is too long", allowed=f"{most} bytes", got=f"{n_bytes:,} bytes"
            )
