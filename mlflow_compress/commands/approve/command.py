"""The command by which a reviewer lets a promotion happen."""

from typing import TYPE_CHECKING, Any

from mlflow_compress.commands.command import Positional, configured, path_text, register_command
from mlflow_compress.config import read_policy
from mlflow_compress.config.declarations import EMBEDDED, OptionalText, Parameters, option
from mlflow_compress.errors import ConfigError

if TYPE_CHECKING:
    from mlflow_compress.commands.approve.run import Approval


class ApproveConfig(Parameters):
    """Let a version that waits for an approval have its alias, if the decision on it still holds."""

    version: OptionalText = option(None, "the version that waits, as `mlflow-compress history` shows it")
    by: OptionalText = option(None, "who approves")
    model: str = option(EMBEDDED, "baseline: 'demo', a folder, or a name that runs show")
    reason: OptionalText = option(None, "why, in your words; kept with the run")
    policy: OptionalText = option(
        None, "YAML file of the policy that must have decided; none: the one that the decision's run holds", path="file"
    )


@register_command(
    "approve",
    ApproveConfig,
    place=7,
    project=False,
    positional=Positional("version", "VERSION", "the version that waits"),
)
def approve(version: int | str | None = None, **parameters: Any) -> "Approval":
    """Return who has the alias now, after a reviewer's approval has moved it.

    Parameters
    ----------
    version : int or str
        The version that waits.
    **parameters

    Raises
    ------
    ConfigError
        Nobody is named, the version does not wait, or the decision no longer holds.

    Examples
    --------
    >>> mc.approve(1)
    Traceback (most recent call last):
        ...
    mlflow_compress.errors.ConfigError: An approval needs a version and a person. Allowed: version=NUMBER and by=NAME.
    """
    given = {} if version is None else {"version": path_text("version", str(version))}
    config = configured(ApproveConfig, {**given, **parameters})
    if config.version is None or config.by is None:
        raise ConfigError("An approval needs a version and a person", allowed="version=NUMBER and by=NAME")
    if config.policy is not None:
        read_policy(config.policy)
    from mlflow_compress.commands.approve.run import run_approve

    return run_approve(config)
