"""Parameters of a run: MLflow changes none, and `mlflow run` has logged all of them as they were given."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

RESOLVED = "resolved/"  # before the name of a parameter that the run has with another value: "auto", for example


def new_parameters(there: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Return what must be logged so that a run shows `values`: new names, and resolved values beside the given ones."""
    new: dict[str, str] = {}
    for name, value in values.items():
        if name not in there:
            new[name] = value
        elif _unquoted(there[name]) != value and RESOLVED + name not in there:
            new[RESOLVED + name] = value
    return new


def _unquoted(text: str) -> str:
    """Return a parameter as it was given to `mlflow run`, which logs it quoted for a shell."""
    try:
        parts = shlex.split(text)
    except ValueError:  # a quotation mark by itself: not quoted by MLflow
        return text
    return parts[0] if len(parts) == 1 else text
