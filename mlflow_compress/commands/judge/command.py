"""The command that compares and grades answers."""

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
from mlflow_compress.commands.judge.parameters import JudgeConfig

if TYPE_CHECKING:
    from mlflow_compress.commands.evaluate.result import AnswerEvaluation
    from mlflow_compress.commands.in_memory import ModelInMemory
    from mlflow_compress.commands.quantize.run import CompressedModel


@register_command(
    "judge",
    JudgeConfig,
    heading="stages",
    place=4,
    project_alone=True,
    resumable=True,
    first=(
        "model",
        "checkpoint",
        "instructions",
        "instruction_limit",
        "judges",
        "judge_model",
        "judge_base_url",
        "num_samples",
        "max_new_tokens",
        "device",
    ),
)
def judge(
    checkpoint: "CompressedModel | ModelInMemory | PathOrText | None" = None,
    *,
    store: StoreLike = None,
    progress: Say | None = None,
    **parameters: Any,
) -> "AnswerEvaluation":
    """Return how similar, and how good, the answers of a checkpoint and its baseline to the same instructions are.

    Parameters
    ----------
    checkpoint : CompressedModel, path, or (model, tokenizer)
        What `compress` returned, or its folder; a loaded transformers model with its tokenizer; or
        "endpoint:http://host:port/v1" of a served model.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    progress : callable (line), optional
        Is told, before the first call, how many calls a judge model will take, and what they may cost.
    **parameters

    Raises
    ------
    MlflowCompressError
        A missing checkpoint, broken instructions, an encoder that does not load, a judge that cannot be reached.

    Examples
    --------
    >>> answers = mc.judge(compressed, answer_args="instruction_limit=1,num_samples=2,max_new_tokens=8", store=folder)
    >>> -1 <= answers["judge/similarity"].value <= 1
    True
    """
    config = configured(JudgeConfig, {"checkpoint": checkpoint, **parameters}, store)
    from mlflow_compress.commands.judge.run import run_judge

    return run_judge(config, store_of(store, config), progress or silent)
