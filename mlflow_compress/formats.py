"""The formats of the files that runs and checkpoints keep, and the steps that make an older one today's.

Such a file holds the number of its format. Who changes a layout raises its number and adds a step here, so that all
readers know today's layout only. A file is converted as it is read and never rewritten: a kill leaves what was there.
"""

from collections.abc import Callable
from typing import Any

from mlflow_compress.errors import MlflowCompressError

STEPS: dict[tuple[str, int], Callable[[Any], Any]] = {}
"""By a file's name and the number of a format: what makes its content that of the next number. No release needs one."""


def upgraded(
    name: str, content: Any, found: object, today: int, *, got: str, error: type[MlflowCompressError], fix: str
) -> Any:
    """Return the content of a file in today's format.

    Parameters
    ----------
    name
        The file's name, `items.parquet` or `compression.json`.
    content
        What was read: a table, or the value of a JSON text.
    found, today
        The number in the file, and the one that this version writes.
    got
        Where the file lies.
    error, fix
        What is raised for a format without a way to today's, and what to do where it is an older one.
    """
    number = found if type(found) is int else 0  # formats count from 1, and 0 has no step
    if number > today:
        what = f"{name} was written by a newer version of mlflow-compress, in a format that this one does not know"
        raise error(what, allowed=f"format {today}", got=f"format {found}: {got}", fix="Install the newer version")
    for before in range(number, today):
        step = STEPS.get((name, before))
        if step is None:
            what = f"{name} has a format that is not read"
            raise error(what, allowed=f"format {today}", got=f"format {found}: {got}", fix=fix)
        content = step(content)
    return content
