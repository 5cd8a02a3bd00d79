"""Evaluation metadata stored next to the record tables: tokenizer hash, number of shots, task hashes."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from mlflow_compress import atomic
from mlflow_compress.config import EvaluateConfig
from mlflow_compress.errors import AlignmentError
from mlflow_compress.items.suite import Suite
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.models.identity import TokenizedModel, tokenizer_hash
from mlflow_compress.stages.task_inputs import task_settings

FILE = "about.json"
# Settings that decide nothing but the prompts, of which the tasks' hashes are taken.
IN_PROMPTS = ("prompt", "apply_chat_template", "fewshot_as_multiturn", "system_prompt")
EvalMetadata = dict[str, object]


def about(model: TokenizedModel, config: EvaluateConfig, suite: Suite) -> EvalMetadata:
    """Return what two evaluations must share to be comparable, beyond their items."""
    return {
        "tokenizer": tokenizer_hash(model.tokenizer),
        "num_fewshot": config.evaluation.num_fewshot,
        "shuffle_fewshot": config.evaluation.shuffle_fewshot,
        "tasks": suite.hashes(),
    }


def settings_of(config: EvaluateConfig) -> dict[str, object]:
    """Return what decides which questions are asked and how, by name; where data and model lie does not."""
    settings = task_settings(config)
    return {f.name: getattr(settings, f.name) for f in fields(TaskSettings) if f.name not in ("data_dir", "model")}


def write_about(folder: Path, content: EvalMetadata) -> None:
    """Write it beside the records."""
    atomic.write(folder / FILE, (json.dumps(content, indent=1) + "\n").encode())


def read_about(folder: Path) -> EvalMetadata:
    """Return what `write_about` wrote; nothing where records come without it."""
    path = folder / FILE
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def check_alike(baseline: EvalMetadata, variant: EvalMetadata) -> None:
    """Refuse evaluations with another tokenizer, number or order of shots; what only one side tells is not compared.

    Raises
    ------
    AlignmentError
        Naming what differs.
    """
    for part in sorted(baseline.keys() & variant.keys()):
        if baseline[part] != variant[part]:
            raise AlignmentError(
                f"The two evaluations differ in their {part}",
                allowed=str(baseline[part]),
                got=variant[part],
                fix="Evaluate both with the same tokenizer and settings",
            )
