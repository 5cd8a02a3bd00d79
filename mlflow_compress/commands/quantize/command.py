"""The command that compresses."""

from typing import TYPE_CHECKING, Any

from mlflow_compress.commands.command import StoreLike, configured, register_command, store_of
from mlflow_compress.commands.quantize.parameters import QuantizeConfig

if TYPE_CHECKING:
    from mlflow_compress.commands.in_memory import ModelInMemory
    from mlflow_compress.commands.quantize.run import CompressedModel


@register_command("quantize", QuantizeConfig, heading="stages", place=2, project_alone=True, resumable=True)
def compress(
    model: "str | ModelInMemory" = "demo", method: str = "awq", *, store: StoreLike = None, **parameters: Any
) -> "CompressedModel":
    """Return a compressed checkpoint, which was loaded again in a fresh process and computes what it should.

    Parameters
    ----------
    model : str, or (model, tokenizer)
        The baseline: "demo", a folder, a Hugging Face hub id, or a loaded transformers model with its tokenizer, which
        is saved in the folder of state first.
    method : str
        A name from `methods()`.
    store : path, optional
        A folder that keeps runs in place of MLflow's tracking store.
    **parameters

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
    config = configured(QuantizeConfig, {"model": model, "method": method, **parameters}, store)
    from mlflow_compress.commands.quantize.run import run_quantize

    return run_quantize(config, store_of(store, config))
