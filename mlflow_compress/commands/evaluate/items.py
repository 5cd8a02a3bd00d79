"""The items of an evaluation: a suite, built once from the parameters, and rendered in the baseline's chat template."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.config import as_text
from mlflow_compress.errors import CheckpointError
from mlflow_compress.items.sources.instructions import Instruction, find_instructions
from mlflow_compress.items.suite import Suite, load_suite
from mlflow_compress.items.task import Sampling, TaskSettings, TraceCorpus, seeded
from mlflow_compress.kept import kept
from mlflow_compress.models.model_files import own_sampling
from mlflow_compress.scoring.generation.chat_format import ChatFormat, chat_format

PROMPT_SETTINGS = (
    *("prompt_style", "apply_chat_template", "fewshot_as_multiturn", "system_prompt", "redact"),
    *("enable_thinking", "thinking_samples", "thinking_max_new_tokens"),
)
"""Settings that change the prompts, or how answers are drawn. The tasks' hashes cover both."""


def _task_settings(config: EvaluateConfig) -> TaskSettings:
    """Return how items are drawn and shown: the parameters of the same names, with "" for a text that is not given."""
    values: dict[str, Any] = {name: "" if value is None else value for name, value in config.values().items()}
    return TaskSettings(**{field.name: values[field.name] for field in fields(TaskSettings)})


def settings_of(config: EvaluateConfig) -> dict[str, object]:
    """Return the settings that decide which questions are asked and how. The paths of data and model do not."""
    settings = _task_settings(config)
    return {f.name: getattr(settings, f.name) for f in fields(TaskSettings) if f.name not in ("data_dir", "model")}


def suite_of(config: EvaluateConfig) -> Suite:
    """Return the suite that a configuration names: tasks and corpora."""
    deciding = tuple((name, value) for name, value in as_text(config).items() if name != "checkpoint")
    suite = kept(
        ("suite", deciding),
        lambda: load_suite(config.evaluation.tasks, model=config.source.model, settings=_task_settings(config)),
    )
    if any(isinstance(corpus, TraceCorpus) for corpus in suite.corpora):
        trace_prompts(config)  # a wrong set is refused now, not when a model has been loaded
    return suite


def with_chat_template(tokenizer: Any, suite: Suite, system: str = "", folder: Path | None = None) -> Suite:
    """Return the suite with its messages rendered in the baseline's chat template, after the system prompt.

    The baseline's template renders the prompts of both models, so that both read the same text. Both draw the answers
    to problems as the generation settings in the baseline's `folder` say; without one, from the whole distribution.
    """
    if not any(task.chat or task.conversations or task.calls for task in suite.tasks):
        return suite
    chat, tasks = chat_format(tokenizer), []
    for task in suite.tasks:
        answering = task.answering
        if answering is not None and answering.thinking is not None:
            if not answering.thinking:
                _require_thinking_can_be_off(chat)
            sampling = Sampling() if folder is None else Sampling(**own_sampling(folder))
            ends: dict[str, Any] = {"until": chat.until, "end_tokens": chat.end_tokens}
            task = replace(task, answering=replace(answering, sampling=sampling, **ends))
        tasks.append(task)
    return replace(suite, tasks=tuple(tasks)).rendered(
        lambda message, **told: chat.prompt([message], system=system, **told),
        lambda messages: chat.conversation(json.loads(messages), system=system),
        lambda asked: chat.conversation(asked["messages"], system=system, tools=asked["tools"]),
        chat.call_form,
    )


def _require_thinking_can_be_off(chat: ChatFormat) -> None:
    if chat.prompt(["question"], enable_thinking=False) == chat.prompt(["question"], enable_thinking=True):
        raise CheckpointError(
            "The baseline's reasoning cannot be turned off: its chat template does not read enable_thinking",
            fix="Leave out enable_thinking=false, or take another model",
        )


def trace_prompts(config: EvaluateConfig) -> list[Instruction]:
    """Return the instructions that the baseline answers for the task `traces`: a seeded draw, in the set's order."""
    asked, settings = config.traces, _task_settings(config)
    instructions = find_instructions(
        asked.trace_instructions, model=config.source.model, settings=settings, parameter="trace_instructions"
    )
    if not 0 < asked.trace_prompts < len(instructions):
        return instructions
    chosen = seeded(settings, "traces").sample(range(len(instructions)), asked.trace_prompts)
    return [instructions[number] for number in sorted(chosen)]
