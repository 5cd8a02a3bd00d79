"""The command that says what every stage would cost."""

from typing import TYPE_CHECKING, Any

from mlflow_compress.commands.command import configured, register_command
from mlflow_compress.commands.plan.parameters import PlanConfig

if TYPE_CHECKING:
    from mlflow_compress.commands.plan.run import CostPlan


@register_command("plan", PlanConfig, heading="start", place=17, project=False)
def plan(**parameters: Any) -> "CostPlan":
    """Return what every stage would cost: tokens, operations, bytes, memory, seconds, dollars. Nothing is run.

    Only the model's configuration and tokenizer are read, so that the plan of a model of any size takes the time that
    it takes to tokenize the tasks.

    **parameters

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
    config = configured(PlanConfig, parameters)
    from mlflow_compress.commands.plan.run import run_plan

    return run_plan(config)
