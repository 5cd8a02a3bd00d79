"""The command that puts variants side by side."""

from typing import TYPE_CHECKING, Any

from mlflow_compress.commands.command import Positional, configured, path_text, register_command
from mlflow_compress.commands.report.parameters import ReportConfig

if TYPE_CHECKING:
    from mlflow_compress.commands.report.run import VariantsReport


@register_command(
    "report",
    ReportConfig,
    place=10,
    positional=Positional("runs", "RUN", "main runs, or a sweep's run"),
    short={"output": "-o"},
)
def report(*runs: str, **parameters: Any) -> "VariantsReport":
    """Return the variants of one evaluation side by side, after writing one page that compares them.

    The page is one HTML file, which opens from disk and in MLflow's artifact view, and loads nothing.

    Parameters
    ----------
    *runs : str
        Ids of main runs of one evaluation, or of a sweep's run.
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
    values = {"runs": ",".join(path_text("runs", run) for run in runs), **parameters} if runs else parameters
    config = configured(ReportConfig, values)
    from mlflow_compress.commands.report.run import run_report

    return run_report(config)
