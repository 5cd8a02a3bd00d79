"""The commands that move an alias, let it move, move it back, and say who had it."""

from typing import TYPE_CHECKING, Any

from mlflow_compress.commands.command import Positional, StoreLike, configured, path_text, register_command, store_of
from mlflow_compress.commands.promote.parameters import ApproveConfig, HistoryConfig, PromoteConfig, RollbackConfig
from mlflow_compress.config import is_endpoint
from mlflow_compress.config.declarations import AUTO
from mlflow_compress.errors import ConfigError
from mlflow_compress.tracking.store import require_tag

if TYPE_CHECKING:
    from mlflow_compress.commands.promote.result import AliasHistory, Approval, Promotion, Rollback


@register_command(
    "approve",
    ApproveConfig,
    within="promote",
    heading="decide",
    place=8,
    project=False,
    positional=Positional("version", "VERSION", "the waiting version"),
)
def approve(version: int | str | None = None, **parameters: Any) -> "Approval":
    """Return who has the alias now, after a reviewer's approval has moved it.

    Parameters
    ----------
    version : int or str
        The version that waits.
    **parameters

    Raises
    ------
    ConfigError
        Nobody is named, the version does not wait, or the decision no longer holds.

    Examples
    --------
    >>> mc.approve(1)
    Traceback (most recent call last):
        ...
    mlflow_compress.errors.ConfigError: An approval needs a version and a person. Allowed: version=NUMBER and by=NAME.
    """
    given = {} if version is None else {"version": path_text("version", str(version))}
    config = configured(ApproveConfig, {**given, **parameters})
    if config.version is None or config.by is None:
        raise ConfigError("An approval needs a version and a person", allowed="version=NUMBER and by=NAME")
    from mlflow_compress.commands.promote.run import run_approve

    return run_approve(config, config.version, config.by)


@register_command("promote", PromoteConfig, heading="decide", place=7, resumable=True, decides=True)
def promote(*, store: StoreLike = None, **parameters: Any) -> "Promotion":
    """Return the decision on all variants of one evaluation, after moving the alias in MLflow's model registry.

    With ``dry_run=True`` the decision is returned, and nothing is written.

    Parameters
    ----------
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store, which it is until the decision is made.
    **parameters

    Raises
    ------
    ConfigError
        There is no finished variant, the evaluation or the model is ambiguous, the alias is not allowed, the policy
        cannot be used, or the waiver has expired.

    Examples
    --------
    >>> mc.promote(max_kl="much")
    Traceback (most recent call last):
        ...
    mlflow_compress.errors.ConfigError: Parameter 'max_kl' must be a number. Got: 'much'.
    """
    config = configured(PromoteConfig, parameters, store)
    if config.policy is not None:  # what is wrong in it is said first
        from mlflow_compress.decide.promotion import gates_of

        gates_of(config.read_policy(), config.policy)
    if config.waiver is not None:
        from mlflow_compress.config.policy import read_waiver

        read_waiver(config.waiver)
    uri = store_of(store, config)
    _require_known(config.model, config.evaluation, uri)
    from mlflow_compress.commands.promote.run import run_promote
    from mlflow_compress.tracking.tracker import in_store

    with in_store(uri):
        return run_promote(config)


@register_command("rollback", RollbackConfig, within="promote", heading="decide", place=8)
def rollback(**parameters: Any) -> "Rollback":
    """Return who has the alias again, after moving it back to the version that had it before.

    A second rollback undoes the first.

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
    _require_known(config.model)
    from mlflow_compress.commands.promote.run import run_rollback

    return run_rollback(config)


@register_command("history", HistoryConfig, within="promote", heading="decide", place=16, project=False)
def history(**parameters: Any) -> "AliasHistory":
    """Return who had an alias when, by which decision and policy, newest first.

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
    _require_known(config.model)
    from mlflow_compress.commands.promote.run import read_history

    return read_history(config)


def _require_known(model: str, evaluation: str = AUTO, uri: str | None = None) -> None:
    """Refuse a baseline or an evaluation that no run has."""
    from mlflow_compress.commands.shared.named_models import model_label

    # The tags of `run_names`, which takes a second to import.
    if not is_endpoint(model):
        require_tag("base_model", model_label(model), "baseline", uri)
    if evaluation != AUTO:
        require_tag("evaluation", evaluation, "evaluation", uri)
