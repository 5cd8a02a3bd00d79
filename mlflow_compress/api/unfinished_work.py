"""The function that does again what did not end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlflow_compress.api.arguments import configured, takes_parameters_of
from mlflow_compress.commands.resume.parameters import ResumeConfig

if TYPE_CHECKING:
    from mlflow_compress.commands.resume.result import Resumed


@takes_parameters_of(ResumeConfig)
def resume(*, progress: Callable[[str], None] | None = None, **settings: Any) -> Resumed:
    """Return what became of the commands that had not ended, after doing them again.

    A command that is killed, or that waits for the tracking server in vain, leaves a note on its machine. What it has
    computed is on disk. So doing it again stores what is left, and computes little.

    Parameters
    ----------
    progress : callable (line), optional
        Is told what happens now.
    **settings
        The parameters of ``mlflow-compress resume``: with ``dry_run=True`` the commands are only listed.

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
    from mlflow_compress.commands.resume.run import run_resume

    config = configured(ResumeConfig, settings)
    return run_resume(config) if progress is None else run_resume(config, progress)
