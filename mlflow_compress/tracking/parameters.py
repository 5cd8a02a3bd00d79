"""Parameters of a run. MLflow cannot change a logged parameter, and `mlflow run` logs all of them as given."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

RESOLVED = "resolved/"  # prefix for the final value of a parameter that was logged with another one, such as "auto"


def new_parameters(there: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters to log so that a run shows `values`: new names, and resolved values under `RESOLVED`."""
    new: dict[str, str] = {}
    for name, value in values.items():
        if name not in there:
            new[name] = value
        elif _unquoted(there[name]) != value and RESOLVED + name not in there:
            new[RESOLVED + name] = value
    return new


def _unquoted(text: str) -> str:
    """Return a parameter as the user gave it to `mlflow run`, which logs it quoted for a shell."""
    try:
        parts = shlex.split(text)
    except ValueError:  # a single quotation mark: not quoted by MLflow
        return text
    return parts[0] if len(parts) == 1 else text
