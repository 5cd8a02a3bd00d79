"""Functions that make and measure one variant."""

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
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.quantize.parameters import QuantizeConfig
from mlflow_compress.commands.speed.parameters import SpeedConfig

if TYPE_CHECKING:
    from mlflow_compress.commands.evaluate.result import AnswerEvaluation, Evaluation
    from mlflow_compress.commands.main.result import VariantRun
    from mlflow_compress.commands.quantize.result import CompressedModel
    from mlflow_compress.commands.speed.result import SpeedMeasurement


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
    from mlflow_compress.commands.quantize.run import run_quantize

    config = configured(QuantizeConfig, {"model": model, "method": method, **settings})
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
    from mlflow_compress.commands.evaluate.run import run_evaluate

    config = configured(EvaluateConfig, {"checkpoint": checkpoint_folder(checkpoint), **settings})
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
        What `compress` returned, or its folder; or "endpoint:http://host:port/v1" of a served model.
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
    from mlflow_compress.commands.judge.run import run_judge

    config = configured(JudgeConfig, {"checkpoint": checkpoint_folder(checkpoint), **settings})
    return run_judge(config, opened_store(store, config), progress or (lambda line: None))


@takes_parameters_of(SpeedConfig)
def speed(
    checkpoint: CompressedModel | str | PathLike[str] | None = None, *, store: StoreLike = None, **settings: Any
) -> SpeedMeasurement:
    """Return how fast a checkpoint is beside its baseline, in the runtime that computes with its format.

    Both are loaded in that runtime (transformers, vLLM or llama.cpp) and timed in turn. A format that is only simulated
    here is not timed; the result says why. A served model is timed by its stream, with its baseline if that is served.

    Parameters
    ----------
    checkpoint : CompressedModel or path
        What `compress` returned, or its folder; or "endpoint:http://host:port/v1" of a served model.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    **settings
        The other parameters of ``mlflow-compress speed``.

    Raises
    ------
    MlflowCompressError
        A missing checkpoint, or a runtime that cannot load it.

    Examples
    --------
    >>> halved = mc.compress("demo", "fp16", store=folder)
    >>> times = mc.speed(halved, speed_repeats=2, speed_prompt_tokens=16, speed_new_tokens=4, store=folder)
    >>> times["speed/decode_ratio_batch_1"].value > 0
    True
    """
    from mlflow_compress.commands.speed.run import run_speed

    config = configured(SpeedConfig, {"checkpoint": checkpoint_folder(checkpoint), **settings})
    return run_speed(config, opened_store(store, config))


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
    from mlflow_compress.commands.main.run import run_main

    config = configured(MainConfig, settings)
    return run_main(config) if progress is None else run_main(config, progress)
