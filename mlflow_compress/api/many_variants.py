"""Functions that make and measure many variants."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlflow_compress.api.arguments import configured, takes_parameters_of
from mlflow_compress.config import SweepConfig

if TYPE_CHECKING:
    from mlflow_compress.results import Sweep, SweepPlan, SweepProgress


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
    >>> plan = mc.sweep(methods="rtn,wanda", bits="8,5", dry_run=True)
    >>> [variant.name for variant in plan.variants]
    ['rtn-8bit-g128', 'wanda-50pct']
    >>> plan.left_out
    {'rtn bits=5': "Method 'rtn' does not support these bits. Allowed: 8, 4, 3, 2. Got: 5."}
    """
    from mlflow_compress.stages.sweep.run_sweep import run_sweep

    config = configured(SweepConfig, settings)
    return run_sweep(config) if progress is None else run_sweep(config, progress)
