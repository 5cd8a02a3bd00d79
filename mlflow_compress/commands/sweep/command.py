"""The command that makes and measures many variants."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlflow_compress.commands.command import configured, register_command, silent
from mlflow_compress.commands.sweep.parameters import SweepConfig

if TYPE_CHECKING:
    from mlflow_compress.commands.sweep.result import Sweep, SweepPlan, SweepProgress


@register_command(
    "sweep",
    SweepConfig,
    heading="start",
    place=11,
    resumable=True,
    first=("model", "methods", "bits", "group_size", "grid", "tasks", "limit", "device", "judge", "dry_run"),
)
def sweep(*, progress: "Callable[[SweepProgress], None] | None" = None, **parameters: Any) -> "Sweep | SweepPlan":
    """Return the scoreboard of many variants of one baseline, after logging each as a main run of its own.

    This is ``mlflow-compress sweep``: every combination of methods, bits and group sizes that is supported. What an
    earlier run of the store holds is found, so that the same call goes on where an interrupted one ended. With
    ``dry_run=True`` nothing is made, and the plan is returned: what would be made, and what it would cost.

    Parameters
    ----------
    progress : callable (SweepProgress), optional
        Is told what happens: a line, and how far each variant is.
    **parameters

    Raises
    ------
    ConfigError, DataError
        A parameter is wrong; no run was made.
    SweepError
        Variants failed; its `published` holds what the others found.

    Examples
    --------
    >>> mc.sweep(methods="rtn,gptq", bits="x")
    Traceback (most recent call last):
        ...
    mlflow_compress.errors.ConfigError: Parameter 'bits' must be a whole number. Allowed: whole numbers, auto. Got: 'x'.
    """
    config = configured(SweepConfig, parameters)
    from mlflow_compress.commands.sweep.grid import asked_for

    asked_for(config)
    from mlflow_compress.commands.sweep.run import run_sweep

    return run_sweep(config, progress or silent)
