"""The command that does again what did not end."""

from typing import TYPE_CHECKING, Any

from mlflow_compress.commands.command import Say, configured, register_command, silent
from mlflow_compress.commands.resume.parameters import ResumeConfig

if TYPE_CHECKING:
    from mlflow_compress.commands.resume.run import Resumed


@register_command("resume", ResumeConfig, heading="keep", place=15)
def resume(*, progress: Say | None = None, **parameters: Any) -> "Resumed":
    """Return what became of the commands that had not ended, after doing them again.

    A command that is killed, or that waits for the tracking server in vain, leaves a note on its machine. What it has
    computed is on disk. So doing it again stores what is left, and computes little.

    Parameters
    ----------
    progress : callable (line), optional
        Is told what happens now.
    **parameters

    Raises
    ------
    ConfigError
        A parameter is wrong.
    StoreAwayError
        The tracking server is still away.

    Examples
    --------
    >>> mc.resume(dry_run="perhaps")
    Traceback (most recent call last):
        ...
    mlflow_compress.errors.ConfigError: Parameter 'dry_run' is a switch. Allowed: true, false. Got: 'perhaps'.
    """
    config = configured(ResumeConfig, parameters)
    from mlflow_compress.commands.resume.run import run_resume

    return run_resume(config, progress or silent)
