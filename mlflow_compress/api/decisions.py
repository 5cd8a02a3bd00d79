"""Functions that decide between variants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlflow_compress.api.arguments import configured, takes_parameters_of
from mlflow_compress.config import PromoteConfig, ReportConfig

if TYPE_CHECKING:
    from mlflow_compress.results import Promotion, VariantsReport


@takes_parameters_of(PromoteConfig)
def promote(**settings: Any) -> Promotion:
    """Return the decision on all variants of one evaluation, after moving the alias in MLflow's model registry.

    Parameters
    ----------
    **settings
        The parameters of ``mlflow-compress promote``.

    Raises
    ------
    ConfigError
        There is no finished variant, the evaluation or the model is ambiguous, or the alias is not allowed.

    Examples
    --------
    >>> mc.promote(max_kl="much")
    Traceback (most recent call last):
        ...
    mlflow_compress.errors.ConfigError: Parameter 'max_kl' must be a number. Got: 'much'.
    """
    from mlflow_compress.stages.promote import run_promote

    return run_promote(configured(PromoteConfig, settings))


@takes_parameters_of(ReportConfig)
def report(*runs: str, **settings: Any) -> VariantsReport:
    """Return the variants of one evaluation side by side, after writing one page that compares them.

    The page is one HTML file, which opens from disk and in MLflow's artifact view, and loads nothing.

    Parameters
    ----------
    *runs : str
        Ids of main runs of one evaluation, or of a sweep's run.
    **settings
        The parameters of ``mlflow-compress report``: `output` names the file. Its suffix says whether it is the page
        (.html) or its tables (.md, .csv, .json).

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
    from mlflow_compress.stages.report_runs import run_report

    given = {"runs": ",".join(runs), **settings} if runs else settings
    return run_report(configured(ReportConfig, given))
