"""Tasks, instructions and calibration text that the parameters name, read and checked before any model is loaded."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.quantize.parameters import QuantizeConfig
from mlflow_compress.compression.method import METHODS
from mlflow_compress.config import as_text
from mlflow_compress.items.sources.calibration_sets import CalibrationSet, load_calibration
from mlflow_compress.items.sources.instructions import Instruction, find_instructions
from mlflow_compress.items.suite import Suite, load_suite
from mlflow_compress.items.task import TaskSettings, TraceCorpus, seeded
from mlflow_compress.kept import kept


def task_settings(config: EvaluateConfig) -> TaskSettings:
    """Return how items are drawn and shown: the parameters of the same names, with "" for a text that is not given."""
    values = config.values()
    named = {field.name: values[field.name] for field in fields(TaskSettings)}
    given: dict[str, Any] = {name: "" if value is None else value for name, value in named.items()}
    return TaskSettings(**given)


def suite_of(config: EvaluateConfig) -> Suite:
    """Return the suite that a configuration names: tasks and corpora."""
    deciding = tuple((name, value) for name, value in as_text(config).items() if name != "checkpoint")
    suite = kept(
        ("suite", deciding),
        lambda: load_suite(config.evaluation.tasks, model=config.source.model, settings=task_settings(config)),
    )
    if any(isinstance(corpus, TraceCorpus) for corpus in suite.corpora):
        trace_prompts(config)  # a wrong set is refused now, not when a model has been loaded
    return suite


def trace_prompts(config: EvaluateConfig) -> list[Instruction]:
    """Return the instructions that the baseline answers for the task `traces`: a seeded draw, in the set's order."""
    asked, settings = config.traces, task_settings(config)
    found = find_instructions(
        asked.trace_instructions, model=config.source.model, settings=settings, parameter="trace_instructions"
    )
    if not 0 < asked.trace_prompts < len(found):
        return found
    chosen = seeded(settings, "traces").sample(range(len(found)), asked.trace_prompts)
    return [found[number] for number in sorted(chosen)]


def instructions_of(config: JudgeConfig) -> list[Instruction]:
    """Return the instructions that a configuration names."""
    settings = TaskSettings(
        seed=config.source.seed, limit=config.answers.instruction_limit, data_dir=config.source.data_dir or ""
    )
    return find_instructions(config.answers.instructions, model=config.source.model, settings=settings)


def calibration_set(config: QuantizeConfig) -> CalibrationSet | None:
    """Return the calibration set of a method; None where the method needs no calibration."""
    if not METHODS.get(config.compression.method).needs_calibration:
        return None
    return load_calibration(
        config.compression.calibration, model=config.source.model, data_dir=config.source.data_dir or ""
    )
