"""The commands that move an alias, move it back, and say who had it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlflow_compress.commands.command import configured, register_command
from mlflow_compress.commands.promote.parameters import HistoryConfig, PromoteConfig, RollbackConfig

if TYPE_CHECKING:
    from mlflow_compress.commands.promote.result import AliasHistory, Promotion, Rollback


@register_command("promote", PromoteConfig, place=7, resumable=True, decides=True)
def promote(**parameters: Any) -> Promotion:
    """Return the decision on all variants of one evaluation, after moving the alias in MLflow's model registry.

    With ``dry_run=True`` the decision is returned, and nothing is written.

    Parameters
    ----------
    **parameters

    Raises
    ------
    ConfigError
        There is no finished variant, the evaluation or the model is ambiguous, the alias is not allowed, or the policy
        cannot be used.

    Examples
    --------
    >>> mc.promote(max_kl="much")
    Traceback (most recent call last):
        ...
    mlflow_compress.errors.ConfigError: Parameter 'max_kl' must be a number. Got: 'much'.
    """
    config = configured(PromoteConfig, parameters)
    from mlflow_compress.commands.promote.run import run_promote

    return run_promote(config)


@register_command("rollback", RollbackConfig, place=8)
def rollback(**parameters: Any) -> Rollback:
    """Return who has the alias again, after moving it back to the version that had it before.

    A second rollback undoes the first.

    Parameters
    ----------
    **parameters

    Raises
    ------
    ConfigError
        Nobody has the alias, nobody had it before, or the version that has it is pinned.

    Examples
    --------
    >>> mc.rollback(alias="latest")
    Traceback (most recent call last):
        ...
    mlflow_compress.errors.ConfigError: This alias is reserved.
    """
    config = configured(RollbackConfig, parameters)
    from mlflow_compress.commands.promote.rollback import run_rollback

    return run_rollback(config)


@register_command("history", HistoryConfig, place=16, project=False)
def history(**parameters: Any) -> AliasHistory:
    """Return who had an alias when, by which decision and policy, newest first.

    Parameters
    ----------
    **parameters

    Raises
    ------
    ConfigError
        Nothing of this baseline was promoted, several models have this name, or the alias is not allowed.

    Examples
    --------
    >>> mc.history(alias="latest")
    Traceback (most recent call last):
        ...
    mlflow_compress.errors.ConfigError: This alias is reserved.
    """
    config = configured(HistoryConfig, parameters)
    from mlflow_compress.commands.promote.rollback import read_history

    return read_history(config)
