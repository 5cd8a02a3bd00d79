"""What the parameters name, read and checked before any model is loaded: tasks, instructions, calibration text."""

from __future__ import annotations

from mlflow_compress.compression.method import METHODS
from mlflow_compress.config import EvaluateConfig, JudgeConfig, QuantizeConfig
from mlflow_compress.items.sources.calibration_sets import CalibrationSet, load_calibration
from mlflow_compress.items.sources.instructions import Instruction, find_instructions
from mlflow_compress.items.suite import Suite, load_suite
from mlflow_compress.items.task import TaskSettings


def task_settings(config: EvaluateConfig) -> TaskSettings:
    """Return how items are drawn and shown."""
    asked = config.evaluation
    return TaskSettings(
        shots=asked.num_fewshot,
        shuffles=asked.num_shuffles,
        seed=config.source.seed,
        limit=asked.limit,
        all_orders=asked.all_orders,
        shuffle_examples=asked.shuffle_fewshot,
        prompt=asked.prompt_style,
        data_dir=config.source.data_dir or "",
        apply_chat_template=asked.apply_chat_template,
        fewshot_as_multiturn=asked.fewshot_as_multiturn,
        system_prompt=config.inference.system_prompt or "",
        model=config.source.model,
    )


def suite_of(config: EvaluateConfig) -> Suite:
    """Return the tasks of a configuration."""
    return load_suite(config.evaluation.tasks, model=config.source.model, settings=task_settings(config))


def instructions_of(config: JudgeConfig) -> list[Instruction]:
    """Return the instructions of a configuration."""
    settings = TaskSettings(
        seed=config.source.seed, limit=config.answers.instruction_limit, data_dir=config.source.data_dir or ""
    )
    return find_instructions(config.answers.instructions, model=config.source.model, settings=settings)


def calibration_set(config: QuantizeConfig) -> CalibrationSet | None:
    """Return what the method is calibrated on, or None where it needs nothing."""
    if not METHODS.get(config.compression.method).needs_calibration:
        return None
    return load_calibration(
        config.compression.calibration, model=config.source.model, data_dir=config.source.data_dir or ""
    )
