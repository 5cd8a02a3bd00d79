"""Functions that decide between variants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlflow_compress.api.arguments import configured, takes_parameters_of
from mlflow_compress.config import PromoteConfig

if TYPE_CHECKING:
    from mlflow_compress.results import Promotion


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
