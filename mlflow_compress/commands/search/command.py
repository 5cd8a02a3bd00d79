"""The command that looks for mixed precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlflow_compress.commands.command import Say, configured, register_command, silent
from mlflow_compress.commands.search.parameters import SearchConfig
from mlflow_compress.errors import ConfigError

if TYPE_CHECKING:
    from mlflow_compress.commands.search.result import Repair, Search


@register_command(
    "search",
    SearchConfig,
    heading="start",
    place=12,
    resumable=True,
    decides=True,
    first=(
        "model",
        "formats",
        "bits_per_weight",
        "max_bytes",
        "max_kl",
        "repair",
        "policy",
        "calibration",
        "tasks",
        "limit",
        "device",
        "output_dir",
    ),
)
def search(*, progress: Say | None = None, **parameters: Any) -> Search | Repair:
    """Return variants of mixed precision: the closest within a budget of bits, or the smallest within a KL.

    This is ``mlflow-compress search``. Each format's cost in each group of layers is the measured KL of the baseline
    with that group alone compressed. An integer programme chooses, the recipe becomes one checkpoint, and that is
    evaluated beside the uniform variants. What an earlier run of the store holds is found.

    With ``repair=RUN`` the variant of a main run that a policy refuses gets more bits where they help most, until it
    passes.

    Parameters
    ----------
    progress : callable (line), optional
        Is told what happens now.
    **parameters

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
    config = configured(SearchConfig, parameters)
    if config.space.repair is not None:
        config.given_for_repair()
        from mlflow_compress.commands.search.repair import run_repair

        return run_repair(config, progress or silent)
    if config.space.policy is not None:
        raise ConfigError("A policy decides about a repair only", got=config.space.policy, fix="Give repair=RUN too")
    from mlflow_compress.commands.shared.named_method import method_settings

    assert config.limited  # else it is refused now
    for variant in config.uniform_variants()[0].values():
        method_settings(variant.compression, variant.source)
    from mlflow_compress.commands.search.run import run_search

    return run_search(config, progress or silent)
