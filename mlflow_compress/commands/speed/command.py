"""The command that measures speed."""

from typing import TYPE_CHECKING, Any

from mlflow_compress.commands.command import PathOrText, StoreLike, configured, register_command, store_of
from mlflow_compress.commands.speed.parameters import SpeedConfig

if TYPE_CHECKING:
    from mlflow_compress.commands.in_memory import ModelInMemory
    from mlflow_compress.commands.quantize.run import CompressedModel
    from mlflow_compress.commands.speed.run import SpeedMeasurement


@register_command("speed", SpeedConfig, heading="stages", place=6, project_alone=True, resumable=True)
def speed(
    checkpoint: "CompressedModel | ModelInMemory | PathOrText | None" = None,
    *,
    store: StoreLike = None,
    **parameters: Any,
) -> "SpeedMeasurement":
    """Return how fast a checkpoint is beside its baseline, in the runtime that computes with its format.

    Both are loaded in that runtime (transformers, vLLM or llama.cpp) and timed in turn. A format that is only simulated
    here is not timed; the result says why. A served model is timed by its stream, with its baseline if that is served.

    Parameters
    ----------
    checkpoint : CompressedModel, path, or (model, tokenizer)
        What `compress` returned, or its folder; a loaded transformers model with its tokenizer; or
        "endpoint:http://host:port/v1" of a served model.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    **parameters

    Raises
    ------
    MlflowCompressError
        A missing checkpoint, or a runtime that cannot load it.

    Examples
    --------
    >>> halved = mc.compress("demo", "fp16", store=folder)
    >>> times = mc.speed(halved, speed_args="repeats=2,prompt_tokens=16,new_tokens=4", store=folder)
    >>> times["speed/decode_ratio_batch_1"].value > 0
    True
    """
    config = configured(SpeedConfig, {"checkpoint": checkpoint, **parameters}, store)
    from mlflow_compress.commands.speed.run import run_speed

    return run_speed(config, store_of(store, config))
