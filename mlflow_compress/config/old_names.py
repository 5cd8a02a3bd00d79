"""Names that parameters had in earlier releases: accepted, with a warning that says the new one."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from mlflow_compress.errors import ConfigError

NEW_NAME = {
    "bertscore": "bertscore_model",
    "out": "output_dir",
    "prompt": "prompt_style",
    "samples": "num_samples",
    "settings": "method_args",
    "shots": "num_fewshot",
    "shuffle_examples": "shuffle_fewshot",
    "shuffles": "num_shuffles",
}


class OldNameWarning(UserWarning):
    """A parameter was given by the name that it had in an earlier release."""


def renamed(values: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the values under the names of today.

    Parameters
    ----------
    values : mapping
        Parameters by name.
    known : collection of str
        The names of today. What is neither one of them nor an old name stays as it is.

    Raises
    ------
    ConfigError
        When one parameter is given by both names.
    """
    new: dict[str, Any] = {}
    for name, value in values.items():
        today = NEW_NAME.get(name)
        if name in known or today not in known:
            new[name] = value
            continue
        if today in values:
            raise ConfigError(f"Parameter '{today}' is given twice", got=f"{name} (its old name) and {today}")
        warnings.warn(f"Parameter '{name}' is now called '{today}'", OldNameWarning, stacklevel=2)
        new[str(today)] = value
    return new
