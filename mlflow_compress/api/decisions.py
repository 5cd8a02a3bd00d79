"""Functions that decide between variants."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any

from mlflow_compress.api.arguments import (
    StoreLike,
    checkpoint_folder,
    configured,
    opened_store,
    takes_parameters_of,
)
from mlflow_compress.commands.gate.parameters import GateConfig
from mlflow_compress.commands.promote.parameters import HistoryConfig, PromoteConfig, RollbackConfig

if TYPE_CHECKING:
    from mlflow_compress.commands.gate.result import GateVerdict
    from mlflow_compress.commands.promote.result import AliasHistory, Promotion, Rollback
    from mlflow_compress.commands.quantize.result import CompressedModel


@takes_parameters_of(PromoteConfig)
def promote(**settings: Any) -> Promotion:
    """Return the decision on all variants of one evaluation, after moving the alias in MLflow's model registry.

    With ``dry_run=True`` the decision is returned, and nothing is written.

    Parameters
    ----------
    **settings
        The parameters of ``mlflow-compress promote``.

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
    from mlflow_compress.commands.promote.run import run_promote

    return run_promote(configured(PromoteConfig, settings))


@takes_parameters_of(RollbackConfig)
def rollback(**settings: Any) -> Rollback:
    """Return who has the alias again, after moving it back to the version that had it before.

    A second rollback undoes the first.

    Parameters
    ----------
    **settings
        The parameters of ``mlflow-compress rollback``.

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
    from mlflow_compress.commands.promote.rollback import run_rollback

    return run_rollback(configured(RollbackConfig, settings))


@takes_parameters_of(HistoryConfig)
def history(**settings: Any) -> AliasHistory:
    """Return who had an alias when, by which decision and policy, newest first.

    Parameters
    ----------
    **settings
        The parameters of ``mlflow-compress history``.

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
    from mlflow_compress.commands.promote.rollback import read_history

    return read_history(configured(HistoryConfig, settings))


@takes_parameters_of(GateConfig)
def gate(
    checkpoint: CompressedModel | str | PathLike[str] | None = None,
    *,
    store: StoreLike = None,
    progress: Callable[[str], None] | None = None,
    **settings: Any,
) -> GateVerdict:
    """Return whether a checkpoint passes a policy, after no more items than that takes.

    Items are scored in random blocks, until every gate is decided or one has failed.

    Parameters
    ----------
    checkpoint : CompressedModel or path
        What `compress` returned, or its folder; or "endpoint:http://host:port/v1" of a served model.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    progress : callable (line), optional
        Is told after each block how far the gate is.
    **settings
        The other parameters of ``mlflow-compress gate``.

    Raises
    ------
    ConfigError
        The policy cannot be decided item by item, or is about no item.
    MlflowCompressError
        A missing or changed checkpoint, tokenizers that differ, broken tasks, a store that cannot be written.

    Examples
    --------
    >>> verdict = mc.gate(compressed, limit=2, store=folder)
    >>> verdict.items_used <= verdict.items_available
    True
    """
    from mlflow_compress.commands.gate.run import run_gate

    config = configured(GateConfig, {"checkpoint": checkpoint_folder(checkpoint), **settings})
    return run_gate(config, opened_store(store, config), progress or (lambda line: None))
