"""The commands that list what there is: methods, tasks, the policy."""

from os import fspath
from typing import TYPE_CHECKING

from mlflow_compress.commands.command import Argument, PathOrText, register_command

if TYPE_CHECKING:
    from mlflow_compress.commands.shared.tabular import Catalog


@register_command(
    "methods",
    description="List the compression methods and what each supports.",
    within="list",
    heading="list",
    place=20,
    project=False,
)
def methods() -> "Catalog":
    """Return the compression methods that are installed, and what each supports.

    Examples
    --------
    >>> "awq" in mc.methods()
    True
    """
    from mlflow_compress.commands.shared.tabular import Catalog
    from mlflow_compress.compression.servers import METHOD_COLUMNS, method_rows

    return Catalog("compression methods", METHOD_COLUMNS, tuple(method_rows()))


@register_command(
    "tasks",
    description="List the named tasks: source, licence, items, shots, rule, hash.",
    within="list",
    heading="list",
    place=21,
    project=False,
)
def tasks() -> "Catalog":
    """Return the named tasks: source, licence, items, shots, rule, and the hash of the definition.

    Examples
    --------
    >>> "demo" in mc.tasks()
    True
    """
    from mlflow_compress.commands.shared.tabular import Catalog
    from mlflow_compress.items.named_tasks import TASK_COLUMNS, task_rows

    return Catalog("named tasks", TASK_COLUMNS, tuple(task_rows()))


@register_command(
    "policy",
    description="Print a promotion policy with every value explained; without a file, the default policy.",
    within="promote",
    heading="decide",
    place=19,
    project=False,
    arguments=(
        Argument(("file",), {"nargs": "?", "metavar": "FILE", "help": "a policy to check; none: the default policy"}),
    ),
)
def policy(file: PathOrText | None = None) -> str:
    """Return a policy as YAML with comments, and its hash as the last line. What cannot be used is refused.

    Parameters
    ----------
    file : path, optional
        A policy; without it, the default one.

    Examples
    --------
    >>> "max" in mc.policy()
    True
    """
    from mlflow_compress.config import policy_yaml, read_policy
    from mlflow_compress.decide.promotion import gates_of

    path = None if file is None else fspath(file)
    described = read_policy(path)
    gates_of(described, path)  # refuses what makes no sense
    return f"{policy_yaml(described)}# sha256 {described.sha256}"
