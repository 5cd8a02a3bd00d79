"""The command that says where a variant's movement comes from."""

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
from mlflow_compress.commands.diagnose.parameters import DiagnoseConfig

if TYPE_CHECKING:
    from mlflow_compress.commands.diagnose.result import Diagnosis
    from mlflow_compress.commands.in_memory import ModelInMemory
    from mlflow_compress.commands.quantize.run import CompressedModel


@register_command(
    "diagnose",
    DiagnoseConfig,
    heading="look",
    place=18,
    resumable=True,
    first=(
        "model",
        "method",
        "bits",
        "checkpoint",
        "tasks",
        "corpus_tokens",
        "corpus_window",
        "noise_control",
        "device",
        "dtype",
    ),
)
def diagnose(
    checkpoint: "CompressedModel | ModelInMemory | PathOrText | None" = None,
    *,
    store: StoreLike = None,
    progress: Say | None = None,
    **parameters: Any,
) -> "Diagnosis":
    """Return how far each group of a variant's weights moves its baseline, and on which text the variant moves.

    One group at a time (q/k/v, o, gate/up, down, ...) replaces the baseline's, and the KL of the final distributions is
    measured at every token of the tasks' corpora.

    Parameters
    ----------
    checkpoint : CompressedModel, path, or (model, tokenizer)
        What `compress` returned, its folder, what others have compressed, or a loaded transformers model with its
        tokenizer. Without it, the variant is made now, with ``method``, ``bits`` and the other parameters of
        `compress`.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    progress : callable (line), optional
        Is told what is measured.
    **parameters

    Raises
    ------
    UnsupportedError
        The variant has another architecture, or nothing that could be swapped group by group.
    MlflowCompressError
        A missing checkpoint, no running text among the tasks, a store that cannot be written.

    Examples
    --------
    >>> moves = mc.diagnose(compressed, diagnosis_args="corpus_tokens=1024", limit=1, store=folder)
    >>> moves.results.no_swap
    0.0
    >>> [group.name for group in moves.results.groups][:2]
    ['layers.0.qkv', 'layers.0.o']
    >>> moves["layers.0.qkv"].kl.value > 0
    True
    """
    config = configured(DiagnoseConfig, {"checkpoint": checkpoint, **parameters}, store)
    from mlflow_compress.commands.diagnose.run import run_diagnose

    return run_diagnose(config, store_of(store, config), progress or silent)
