"""The function that says where a variant's movement comes from."""

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
from mlflow_compress.commands.diagnose.parameters import DiagnoseConfig

if TYPE_CHECKING:
    from mlflow_compress.commands.diagnose.result import Diagnosis
    from mlflow_compress.commands.quantize.result import CompressedModel


@takes_parameters_of(DiagnoseConfig)
def diagnose(
    checkpoint: CompressedModel | str | PathLike[str] | None = None,
    *,
    store: StoreLike = None,
    progress: Callable[[str], None] | None = None,
    **settings: Any,
) -> Diagnosis:
    """Return how far each group of a variant's weights moves its baseline, and on which text the variant moves.

    One group at a time (q/k/v, o, gate/up, down, ...) replaces the baseline's, and the KL of the final distributions is
    measured at every token of the tasks' corpora.

    Parameters
    ----------
    checkpoint : CompressedModel or path
        What `compress` returned, its folder, or what others have compressed. Without it, the variant is made now, with
        ``method``, ``bits`` and the other parameters of `compress`.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    progress : callable (line), optional
        Is told what is measured.
    **settings
        The other parameters of ``mlflow-compress diagnose``.

    Raises
    ------
    UnsupportedError
        The variant has another architecture, or nothing that could be swapped group by group.
    MlflowCompressError
        A missing checkpoint, no running text among the tasks, a store that cannot be written.

    Examples
    --------
    >>> moves = mc.diagnose(compressed, corpus_tokens=1024, limit=1, store=folder)
    >>> moves.found.no_swap
    0.0
    >>> [group.name for group in moves.found.groups][:2]
    ['layers.0.qkv', 'layers.0.o']
    >>> moves["layers.0.qkv"].kl.value > 0
    True
    """
    from mlflow_compress.commands.diagnose.run import run_diagnose

    config = configured(DiagnoseConfig, {"checkpoint": checkpoint_folder(checkpoint), **settings})
    return run_diagnose(config, opened_store(store, config), progress or (lambda line: None))
