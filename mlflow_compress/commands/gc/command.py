"""The command that clears a shared store."""

from typing import TYPE_CHECKING, Any

from mlflow_compress.commands.command import configured, register_command
from mlflow_compress.config.declarations import AUTO, OptionalText, Parameters, option

if TYPE_CHECKING:
    from mlflow_compress.commands.gc.result import Retention


class _GcConfig(Parameters):
    """Show which runs of a store can be deleted, and the space this frees; mark them for `mlflow gc` if asked."""

    older_than: int = option(90, "days; a run that ended more recently stays", ge=0)
    base_model: OptionalText = option(None, "only runs of the baseline with this name; none: of all")
    delete: bool = option(False, "true marks the runs as deleted; false is a dry run")


@register_command("gc", _GcConfig, heading="keep", place=27, project=False)
def gc(**parameters: Any) -> "Retention":
    """Return which runs of MLflow's store may be deleted, what that frees, and why the others stay.

    A run stays with a registered version, a receipt or a decision, and with every run that such a run needs.

    **parameters

    Examples
    --------
    >>> mc.gc(older_than=-1)
    Traceback (most recent call last):
        ...
    mlflow_compress.errors.ConfigError: Parameter 'older_than' is too small.
    """
    config = configured(_GcConfig, parameters)
    from mlflow_compress.commands.gc.result import Retention
    from mlflow_compress.tracking.retention import deletable_runs, mark_deleted
    from mlflow_compress.tracking.tracker import Tracker

    tracker = Tracker()
    experiment = None if config.experiment == AUTO else config.experiment
    runs, kept = deletable_runs(tracker, days=config.older_than, label=config.base_model, experiment=experiment)
    if config.delete:
        mark_deleted(tracker, runs)
    return Retention(runs=runs, kept=kept, deleted=config.delete, size_bytes=sum(run.size_bytes for run in runs))
