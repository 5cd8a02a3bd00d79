"""The Python front door: `import mlflow_compress as mc`.

Every function takes the parameters of the command of the same name (`mlflow-compress evaluate --help`), as keyword
arguments, and returns a typed result with `to_pandas()`, `to_arrow()`, `to_dict()` and a table in notebooks.

`store` says where runs are kept. Without it that is MLflow's tracking store (`MLFLOW_TRACKING_URI`); with a folder's
path it is that folder, and nothing is written to MLflow. Either way a baseline is evaluated once and found again.
"""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_compress.api_arguments import StoreLike, checkpoint_folder, configured, opened_store, takes_parameters_of
from mlflow_compress.config import (
    EvaluateConfig,
    JudgeConfig,
    MainConfig,
    PromoteConfig,
    QuantizeConfig,
)

if TYPE_CHECKING:
    from mlflow_compress.results import (
        AnswerEvaluation,
        Comparison,
        CompressedModel,
        Evaluation,
        Listing,
        Promotion,
        VariantRun,
    )


@takes_parameters_of(QuantizeConfig)
def compress(model: str = "demo", method: str = "awq", *, store: StoreLike = None, **settings: Any) -> CompressedModel:
    """Return a compressed checkpoint, which was loaded again in a fresh process and computes what it should.

    Parameters
    ----------
    model : str
        The baseline: "demo", a folder, or a Hugging Face hub id.
    method : str
        A name from `methods()`.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    **settings
        The other parameters of ``mlflow-compress quantize``.

    Raises
    ------
    MlflowCompressError
        Whatever is wrong with the parameters, the model or the calibration text, in one sentence.

    Examples
    --------
    >>> compressed = mc.compress("demo", "rtn", bits=4, store=folder)
    >>> compressed.name
    'rtn-4bit-g128'
    >>> round(compressed.manifest.size_ratio, 1)
    2.3
    """
    from mlflow_compress.stages.quantize import run_quantize

    config = configured(QuantizeConfig, {"model": model, "method": method, **settings})
    return run_quantize(config, opened_store(store))


@takes_parameters_of(EvaluateConfig)
def evaluate(
    checkpoint: CompressedModel | str | PathLike[str] | None = None, *, store: StoreLike = None, **settings: Any
) -> Evaluation:
    """Return every metric of a compressed checkpoint against its baseline, on the same items, with intervals.

    The baseline is evaluated once per store and found again; so is a checkpoint that was evaluated before.

    Parameters
    ----------
    checkpoint : CompressedModel or path
        What `compress` returned, or its folder.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    **settings
        The other parameters of ``mlflow-compress evaluate``.

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
    ['category', 'high', 'level', 'low']
    """
    from mlflow_compress.stages.evaluate import run_evaluate

    config = configured(EvaluateConfig, {"checkpoint": checkpoint_folder(checkpoint), **settings})
    return run_evaluate(config, opened_store(store))


@takes_parameters_of(JudgeConfig)
def judge(
    checkpoint: CompressedModel | str | PathLike[str] | None = None, *, store: StoreLike = None, **settings: Any
) -> AnswerEvaluation:
    """Return how similar, and how good, the answers of a checkpoint and its baseline to the same instructions are.

    Parameters
    ----------
    checkpoint : CompressedModel or path
        What `compress` returned, or its folder.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    **settings
        The other parameters of ``mlflow-compress judge``. MT-Bench grades need ``OPENAI_API_KEY``.

    Raises
    ------
    MlflowCompressError
        A missing checkpoint, broken instructions, an encoder that does not load, a judge that cannot be reached.

    Examples
    --------
    >>> answers = mc.judge(compressed, instruction_limit=1, num_samples=2, max_new_tokens=8, store=folder)
    >>> -1 <= answers["judge/similarity"].value <= 1
    True
    """
    from mlflow_compress.stages.judge import run_judge

    config = configured(JudgeConfig, {"checkpoint": checkpoint_folder(checkpoint), **settings})
    return run_judge(config, opened_store(store))


@takes_parameters_of(MainConfig)
def run(*, progress: Callable[[str], None] | None = None, **settings: Any) -> VariantRun:
    """Return what compression, evaluation and judge of one variant found, after logging it as MLflow runs.

    This is ``mlflow-compress main``: the stages are MLflow projects, children of one run with report and figures.

    Parameters
    ----------
    progress : callable (line), optional
        Is told what happens now, and how long it took before.
    **settings
        The parameters of ``mlflow-compress main``.

    Raises
    ------
    ConfigError, DataError
        A parameter is wrong; no run was made.
    StageError
        A stage failed; its `published` holds what the others found.

    Examples
    --------
    >>> mc.run(method="rtn", limit=-1)
    Traceback (most recent call last):
        ...
    mlflow_compress.errors.ConfigError: Parameter 'limit' is too small. Allowed: 0 or more. Got: -1.
    """
    from mlflow_compress.stages.main import run_main

    config = configured(MainConfig, settings)
    return run_main(config) if progress is None else run_main(config, progress)


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
    from mlflow_compress.results import Evaluation
    from mlflow_compress.stages.compare import compare as compare_sources

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
    from mlflow_compress.stages.load_evaluation import from_folder, from_run

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
    from mlflow_compress.compression.method_table import COLUMNS, rows
    from mlflow_compress.results import Listing

    return Listing("compression methods", COLUMNS, tuple(rows()))


def tasks() -> Listing:
    """Return the named tasks: source, licence, items, shots, rule, and the hash of the definition.

    Examples
    --------
    >>> "demo" in mc.tasks()
    True
    """
    from mlflow_compress.items.task_table import COLUMNS, rows
    from mlflow_compress.results import Listing

    return Listing("named tasks", COLUMNS, tuple(rows()))
