"""The command that measures a variant against its baseline."""

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
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig

if TYPE_CHECKING:
    from mlflow_compress.commands.evaluate.result import Evaluation
    from mlflow_compress.commands.in_memory import ModelInMemory
    from mlflow_compress.commands.quantize.run import CompressedModel


@register_command(
    "evaluate",
    EvaluateConfig,
    heading="stages",
    place=3,
    project_alone=True,
    resumable=True,
    first=(
        "model",
        "checkpoint",
        "tasks",
        "num_fewshot",
        "limit",
        "device",
        "dtype",
        "engine",
        "served_model",
        "tokenizer",
    ),
)
def evaluate(
    checkpoint: "CompressedModel | ModelInMemory | PathOrText | None" = None,
    *,
    store: StoreLike = None,
    progress: Say | None = None,
    **parameters: Any,
) -> "Evaluation":
    """Return every metric of a compressed checkpoint against its baseline, on the same items, with intervals.

    The baseline is evaluated once per store and found again; so is a checkpoint that was evaluated before.

    Parameters
    ----------
    checkpoint : CompressedModel, path, or (model, tokenizer)
        What `compress` returned, or its folder; a loaded transformers model with its tokenizer; or
        "endpoint:http://host:port/v1" of a served model, whose name there is `served_model`.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    progress : callable (line), optional
        Is told, before anything is asked, what the server of a served model can.
    **parameters

    Raises
    ------
    MlflowCompressError
        A missing or changed checkpoint, tokenizers that differ, broken tasks, a store that cannot be written.

    Examples
    --------
    >>> found = mc.evaluate(compressed, limit=2, store=folder)
    >>> flips = found["distance/flips_pct"]
    >>> flips.low <= flips.value <= flips.high
    True
    >>> sorted(found.to_pandas().columns)[:4]
    ['high', 'label', 'level', 'low']
    """
    config = configured(EvaluateConfig, {"checkpoint": checkpoint, **parameters}, store)
    from mlflow_compress.commands.evaluate.run import run_evaluate

    return run_evaluate(config, store_of(store, config), progress or silent)
