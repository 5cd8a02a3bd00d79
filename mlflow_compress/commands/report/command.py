"""The command that puts variants side by side."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlflow_compress.commands.command import (
    Positional,
    ResultOfRun,
    StoreLike,
    configured,
    register_command,
    run_id_of,
    store_of,
)
from mlflow_compress.commands.report.parameters import ReportConfig

if TYPE_CHECKING:
    from mlflow_compress.commands.report.run import VariantsReport


@register_command(
    "report",
    ReportConfig,
    heading="look",
    place=10,
    positional=Positional("runs", "RUN", "main runs, or a sweep's run"),
    short={"output": "-o"},
)
def report(
    *runs: ResultOfRun | str | Sequence[ResultOfRun | str], store: StoreLike = None, **parameters: Any
) -> "VariantsReport":
    """Return the variants of one evaluation side by side, after writing one page that compares them.

    The page is one HTML file, which opens from disk and in MLflow's artifact view, and loads nothing.

    Parameters
    ----------
    *runs : Sweep, VariantRun, str, or a list of VariantRun and str
        What `sweep` or `run` returned, or the ids of main runs of one evaluation or of a sweep's run.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    **parameters

    Raises
    ------
    ConfigError
        No run is given, a run is no main run and no sweep, or the runs were evaluated differently.
    TrackingError
        The store has no such run.

    Examples
    --------
    >>> mc.report(output="report.html")
    Traceback (most recent call last):
        ...
    mlflow_compress.errors.ConfigError: No run to report on. Allowed: ids of main runs of one evaluation, ...
    """
    single = [one for run in runs for one in (run if isinstance(run, list | tuple) else [run])]
    values = {"runs": ",".join(run_id_of("runs", run) for run in single), **parameters} if runs else parameters
    config = configured(ReportConfig, values, store)
    from mlflow_compress.commands.report.run import run_report

    return run_report(config, store_of(store, config))
