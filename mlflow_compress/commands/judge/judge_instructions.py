"""The instructions that both models answer, as the parameters name them."""

from mlflow_compress.config import JudgeSettings
from mlflow_compress.items.sources.instructions import Instruction, find_instructions
from mlflow_compress.items.task import TaskSettings


def instructions_of(config: JudgeSettings) -> list[Instruction]:
    """Return the instructions that a configuration names."""
    settings = TaskSettings(
        seed=config.source.seed,
        limit=config.answers.instruction_limit,
        data_dir=config.source.data_dir or "",
        redact=config.inference.redact or "",
        system_prompt=config.inference.system_prompt or "",
    )
    return find_instructions(config.answers.instructions, model=config.source.model, settings=settings)
