"""Functions that make and measure one variant."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any

from mlflow_compress.api.arguments import (
    StoreLike,
    checkpoint_folder,
    configured,
    noted,
    opened_store,
    takes_parameters_of,
)
from mlflow_compress.config import EvaluateConfig, JudgeConfig, MainConfig, QuantizeConfig

if TYPE_CHECKING:
    from mlflow_compress.results import AnswerEvaluation, CompressedModel, Evaluation, VariantRun


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
    with noted(config, store):
        return run_quantize(config, opened_store(store, config))


@takes_parameters_of(EvaluateConfig)
def evaluate(
    checkpoint: CompressedModel | str | PathLike[str] | None = None,
    *,
    store: StoreLike = None,
    progress: Callable[[str], None] | None = None,
    **settings: Any,
) -> Evaluation:
    """Return every metric of a compressed checkpoint against its baseline, on the same items, with intervals.

    The baseline is evaluated once per store and found again; so is a checkpoint that was evaluated before.

    Parameters
    ----------
    checkpoint : CompressedModel or path
        What `compress` returned, or its folder; or "endpoint:http://host:port/v1" of a served model, whose name there
        is `served_model`.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    progress : callable (line), optional
        Is told, before anything is asked, what the server of a served model can.
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
    with noted(config, store):
        return run_evaluate(config, opened_store(store, config), progress or (lambda line: None))


@takes_parameters_of(JudgeConfig)
def judge(
    checkpoint: CompressedModel | str | PathLike[str] | None = None,
    *,
    store: StoreLike = None,
    progress: Callable[[str], None] | None = None,
    **settings: Any,
) -> AnswerEvaluation:
    """Return how similar, and how good, the answers of a checkpoint and its baseline to the same instructions are.

    Parameters
    ----------
    checkpoint : CompressedModel or path
        What `compress` returned, or its folder.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    progress : callable (line), optional
        Is told, before the first call, how many calls a judge model will take, and what they may cost.
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
    with noted(config, store):
        return run_judge(config, opened_store(store, config), progress or (lambda line: None))


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
    with noted(config):
        return run_main(config) if progress is None else run_main(config, progress)
