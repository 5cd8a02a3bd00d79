"""Functions about many variants: make and measure them, and put them side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlflow_compress.api.arguments import configured, takes_parameters_of
from mlflow_compress.commands.report.parameters import ReportConfig
from mlflow_compress.commands.search.parameters import SearchConfig
from mlflow_compress.commands.sweep.parameters import SweepConfig

if TYPE_CHECKING:
    from mlflow_compress.commands.report.result import VariantsReport
    from mlflow_compress.commands.search.result import Search
    from mlflow_compress.commands.sweep.result import Sweep, SweepPlan, SweepProgress


@takes_parameters_of(SweepConfig)
def sweep(*, progress: Callable[[SweepProgress], None] | None = None, **settings: Any) -> Sweep | SweepPlan:
    """Return the scoreboard of many variants of one baseline, after logging each as a main run of its own.

    This is ``mlflow-compress sweep``: every combination of methods, bits and group sizes that is supported. What an
    earlier run of the store holds is found, so that the same call goes on where an interrupted one ended. With
    ``dry_run=True`` nothing is made, and the plan is returned: what would be made, and what it would cost.

    Parameters
    ----------
    progress : callable (SweepProgress), optional
        Is told what happens: a line, and how far each variant is.
    **settings
        The parameters of ``mlflow-compress sweep``.

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
    from mlflow_compress.commands.sweep.run import run_sweep

    config = configured(SweepConfig, settings)
    return run_sweep(config) if progress is None else run_sweep(config, progress)


@takes_parameters_of(SearchConfig)
def search(*, progress: Callable[[str], None] | None = None, **settings: Any) -> Search:
    """Return variants of mixed precision: the closest within a budget of bits, or the smallest within a KL.

    This is ``mlflow-compress search``. Each format's cost in each group of layers is the measured KL of the baseline
    with that group alone compressed. An integer programme chooses, the recipe becomes one checkpoint, and that is
    evaluated beside the uniform variants. What an earlier run of the store holds is found.

    Parameters
    ----------
    progress : callable (line), optional
        Is told what happens now.
    **settings
        The parameters of ``mlflow-compress search``.

    Raises
    ------
    ConfigError, DataError
        A parameter is wrong. A budget that no choice of formats keeps to names the range.
    StageError
        A variant could not be made.

    Examples
    --------
    >>> mc.search(formats="rtn:3,rtn:8", bits_per_weight=2.5)
    Traceback (most recent call last):
        ...
    mlflow_compress.errors.ConfigError: bits_per_weight is out of range. Allowed: 3 (every group in its smallest ...
    """
    from mlflow_compress.commands.search.run import run_search

    config = configured(SearchConfig, settings)
    return run_search(config) if progress is None else run_search(config, progress)


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
    from mlflow_compress.commands.report.run import run_report

    given = {"runs": ",".join(runs), **settings} if runs else settings
    return run_report(configured(ReportConfig, given))
