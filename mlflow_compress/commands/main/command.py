"""The command that makes and measures one variant."""

from typing import TYPE_CHECKING, Any

from mlflow_compress.commands.command import Say, configured, register_command, silent
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.warm_python import WarmPython

if TYPE_CHECKING:
    from mlflow_compress.commands.main.stages import VariantRun

_OF_EVERY_STAGE = (
    "mlflow_compress.cli",
    "mlflow_compress.commands.quantize.run",
    "mlflow.store.tracking.sqlalchemy_store",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "compressed_tensors",
)
_OF_LATER_STAGES = (
    "mlflow_compress.commands.evaluate.run",
    "mlflow_compress.commands.judge.run",
    "sentence_transformers",
    "mlflow_compress.scoring.kernels.logit_stats:load_loops",
    "mlflow_compress.metrics.core.language:classifier",
)


@register_command(
    "main",
    MainConfig,
    heading="start",
    place=1,
    resumable=True,
    first=("model", "method", "bits", "group_size", "checkpoint", "tasks", "limit", "device", "judge", "judge_model"),
)
def run(*, progress: Say | None = None, **parameters: Any) -> "VariantRun":
    """Return what compression, evaluation and judge of one variant found, after logging it as MLflow runs.

    This is ``mlflow-compress main``: the stages are MLflow projects, children of one run with report and figures.

    Parameters
    ----------
    progress : callable (line), optional
        Is told what happens now, and how long it took before.
    **parameters

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
    # It imports them while this process checks, and imports what it needs.
    with WarmPython(_OF_EVERY_STAGE, later=_OF_LATER_STAGES) as python:
        config, say = configured(MainConfig, parameters), progress or silent
        say("[check] reads tasks, texts and parameters, and loads the libraries")
        from mlflow_compress.commands.main.run import run_main

        return run_main(config, python, say)
