"""The project's one reader of YAML: strict, and with one clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from mlflow_compress.errors import ConfigError


class _OnceLoader(yaml.SafeLoader):  # type: ignore[misc]
    """The safe loader, which also refuses a name that is there twice; the last would win without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Return the mapping of a node."""
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if twice := [name for name in names if names.count(name) > 1]:
            raise yaml.MarkedYAMLError(
                problem=f"the name {twice[0][:60]!r} is there twice", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, *, parameter: str) -> Any:
    """Return the value of a YAML file, None if it is empty; `parameter` is the one that names the file.

    Raises
    ------
    ConfigError
        The file cannot be read, is no YAML, has a name twice, or is nested too deeply.
    """
    try:
        return yaml.load(path.expanduser().read_text(encoding="utf-8"), Loader=_OnceLoader)
    except RecursionError:
        reason = "it is nested too deeply"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        reason = f"{error.problem}{f', line {mark.line + 1}' if mark is not None else ''}"
    except (OSError, ValueError, RuntimeError, OverflowError, TypeError, yaml.YAMLError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    raise ConfigError(f"Parameter '{parameter}' names no YAML file that can be read: {reason}", got=str(path))
