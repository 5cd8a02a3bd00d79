"""What the parameters name, read and checked before any model is loaded: tasks, instructions, calibration text."""

from __future__ import annotations

from dataclasses import fields

from mlflow_compress.compress.method import METHODS
from mlflow_compress.config import EvaluateSettings, JudgeSettings, QuantizeConfig
from mlflow_compress.tasks.sources.calibration_sets import CalibrationSet, load_calibration
from mlflow_compress.tasks.sources.instructions import Instruction, find_instructions
from mlflow_compress.tasks.suite import Suite, load_suite
from mlflow_compress.tasks.task import TaskSettings


def suite_of(config: EvaluateSettings) -> Suite:
    """Return the tasks of a configuration."""
    settings = TaskSettings(**{f.name: getattr(config, f.name) for f in fields(TaskSettings)})
    return load_suite(config.tasks, model=config.model, settings=settings)


def instructions_of(config: JudgeSettings) -> list[Instruction]:
    """Return the instructions of a configuration."""
    settings = TaskSettings(seed=config.seed, limit=config.limit, data_dir=config.data_dir)
    return find_instructions(config.instructions, model=config.model, settings=settings)


def calibration_set(config: QuantizeConfig) -> CalibrationSet | None:
    """Return what the method is calibrated on, or None where it needs nothing."""
    if not METHODS.get(config.method).needs_calibration:
        return None
    return load_calibration(config.calibration, model=config.model, data_dir=config.data_dir)
