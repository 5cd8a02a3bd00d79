"""`mlflow run` of this project, without MLflow's own lines about folders, tables and commands.

MLflow shows the command that it starts with every parameter, 1,500 characters for `main`, and has no option for that.
It imports the plug-ins of `mlflow.run_context_provider` before it does anything, so this module is one of them.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from mlflow.tracking.context.abstract_context import RunContextProvider

_WRITTEN_BY = "tools/write_mlprojects.py"
"""Stands in the first line of each of our MLproject files."""


def runs_our_project(arguments: Sequence[str]) -> bool:
    """Return whether a command line is `mlflow run` of a folder with one of our projects."""
    files = [Path(argument) / "MLproject" for argument in arguments[2:]]
    return arguments[1:2] == ["run"] and any(
        file.is_file() and _WRITTEN_BY in file.read_text(encoding="utf-8", errors="replace") for file in files
    )


class QuietProjectRuns(RunContextProvider):  # type: ignore[misc]
    """Adds no tags to runs. Errors of MLflow, and its lines about an environment that it builds, stay."""

    def __init__(self) -> None:
        if runs_our_project(sys.argv):
            for name in ("mlflow.projects", "mlflow.store.db.utils"):
                logging.getLogger(name).setLevel(logging.WARNING)

    def in_context(self) -> bool:
        return False

    def tags(self) -> dict[str, str]:
        return {}
