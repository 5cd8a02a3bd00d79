"""The command that decides on a checkpoint, after no more items than that takes."""

from typing import TYPE_CHECKING, Any

from mlflow_compress.commands.command import (
    PathOrText,
    Say,
    StoreLike,
    configured,
    register_command,
    silent,
    store_of,
)
from mlflow_compress.commands.gate.parameters import GateConfig

if TYPE_CHECKING:
    from mlflow_compress.commands.gate.run import GateVerdict
    from mlflow_compress.commands.in_memory import ModelInMemory
    from mlflow_compress.commands.quantize.run import CompressedModel


@register_command(
    "gate",
    GateConfig,
    heading="start",
    place=13,
    decides=True,
    first=("model", "checkpoint", "policy", "tasks", "limit", "error", "block", "output", "device", "dtype"),
)
def gate(
    checkpoint: "CompressedModel | ModelInMemory | PathOrText | None" = None,
    *,
    store: StoreLike = None,
    progress: Say | None = None,
    **parameters: Any,
) -> "GateVerdict":
    """Return whether a checkpoint passes a policy, after no more items than that takes.

    Items are scored in random blocks, until every gate is decided or one has failed.

    Parameters
    ----------
    checkpoint : CompressedModel, path, or (model, tokenizer)
        What `compress` returned, or its folder; a loaded transformers model with its tokenizer; or
        "endpoint:http://host:port/v1" of a served model.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    progress : callable (line), optional
        Is told after each block how far the gate is.
    **parameters

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
    config = configured(GateConfig, {"checkpoint": checkpoint, **parameters}, store)
    from mlflow_compress.commands.gate.run import run_gate

    return run_gate(config, store_of(store, config), progress or silent)
