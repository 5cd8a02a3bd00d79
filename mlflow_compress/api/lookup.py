"""Functions that read what exists: evaluations, methods and tasks. No model is loaded."""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_compress.api.arguments import StoreLike, configured, opened_store, takes_parameters_of
from mlflow_compress.commands.plan.parameters import PlanConfig

if TYPE_CHECKING:
    from mlflow_compress.commands.compare.result import Comparison
    from mlflow_compress.commands.evaluate.result import Evaluation
    from mlflow_compress.commands.plan.result import CostPlan
    from mlflow_compress.commands.shared.listing import Listing


def compare(
    baseline: Evaluation | str | PathLike[str], variant: Evaluation | str | PathLike[str], *, store: StoreLike = None
) -> Comparison:
    """Return accuracy, flips and McNemar's test of two evaluations, from what they left on disk: no model is loaded.

    Parameters
    ----------
    baseline, variant : Evaluation, str or path
        What `evaluate` or `load` returned, a run id, a folder of Parquet records, a sample log of
        lm-evaluation-harness, or a JSONL file with ``{"id", "pred", "gold"}`` per line.
    store : path, optional
        The folder in which run ids are looked up in place of MLflow's tracking store.

    Raises
    ------
    AlignmentError
        The two answered other items, prompts, answer orders or few-shot examples.
    ConfigError, DataError
        A side cannot be found or read.

    Examples
    --------
    >>> same = mc.compare(found, found)
    >>> same["flips_pct"], same["mcnemar_p"]
    (0.0, 1.0)
    """
    from mlflow_compress.commands.compare.run import compare as compare_sources
    from mlflow_compress.commands.evaluate.result import Evaluation

    left, right = (fspath(s.records_folder if isinstance(s, Evaluation) else s) for s in (baseline, variant))
    return compare_sources(left, right, opened_store(store))


def load(source: str | PathLike[str], *, store: StoreLike = None) -> Evaluation:
    """Return an evaluation that was made before.

    Parameters
    ----------
    source : str or path
        The id of an evaluate run, a baseline run or a main run; or a folder of Parquet records, whose metrics are
        computed now.
    store : path, optional
        The folder in which run ids are looked up in place of MLflow's tracking store.

    Raises
    ------
    ConfigError, TrackingError
        There is no such run or folder, or it holds no evaluation.

    Examples
    --------
    >>> again = mc.load(found.run.run_id, store=folder)
    >>> again.metrics == found.metrics
    True
    """
    from mlflow_compress.commands.compare.run import from_folder, from_run

    if Path(source).is_dir():
        return from_folder(Path(source))
    return from_run(fspath(source), opened_store(store))


def methods() -> Listing:
    """Return the compression methods that are installed, and what each supports.

    Examples
    --------
    >>> "awq" in mc.methods()
    True
    """
    from mlflow_compress.commands.shared.listing import Listing
    from mlflow_compress.compression.method_table import COLUMNS, rows

    return Listing("compression methods", COLUMNS, tuple(rows()))


def tasks() -> Listing:
    """Return the named tasks: source, licence, items, shots, rule, and the hash of the definition.

    Examples
    --------
    >>> "demo" in mc.tasks()
    True
    """
    from mlflow_compress.commands.shared.listing import Listing
    from mlflow_compress.items.named_tasks import COLUMNS, rows

    return Listing("named tasks", COLUMNS, tuple(rows()))


@takes_parameters_of(PlanConfig)
def plan(**settings: Any) -> CostPlan:
    """Return what every stage would cost: tokens, operations, bytes, memory, seconds, dollars. Nothing is run.

    Only the model's configuration and tokenizer are read, so that the plan of a model of any size takes the time that
    it takes to tokenize the tasks.

    Parameters
    ----------
    **settings
        The parameters of ``mlflow-compress plan``.

    Raises
    ------
    ConfigError, CheckpointError, DataError
        A parameter is wrong, or the model's configuration, its tokenizer or a task cannot be read.

    Examples
    --------
    >>> found = mc.plan(limit=2, device="cpu", judge=False)
    >>> [stage.stage for stage in found.stages]
    ['baseline', 'baseline again (noise)', 'quantize (awq)', 'evaluate']
    """
    from mlflow_compress.commands.plan.run import run_plan

    return run_plan(configured(PlanConfig, settings))
