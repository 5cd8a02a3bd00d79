"""Evaluation metadata stored next to the record tables: tokenizer hash, few-shot settings, task hashes."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from mlflow_compress import atomic
from mlflow_compress.config import EvaluateConfig
from mlflow_compress.errors import AlignmentError
from mlflow_compress.files.json_text import read_json_object
from mlflow_compress.items.suite import Suite
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.models.identity import TokenizedModel, tokenizer_hash
from mlflow_compress.stages.task_inputs import task_settings

FILE = "about.json"
PROMPT_SETTINGS = ("prompt_style", "apply_chat_template", "fewshot_as_multiturn", "system_prompt")
"""Settings that change the prompts only. The tasks' hashes cover the prompts."""

EvalMetadata = dict[str, object]


def eval_metadata(model: TokenizedModel, config: EvaluateConfig, suite: Suite) -> EvalMetadata:
    """Return what two evaluations must share to be comparable, in addition to their items."""
    return {
        "tokenizer": tokenizer_hash(model.tokenizer),
        "num_fewshot": config.evaluation.num_fewshot,
        "shuffle_fewshot": config.evaluation.shuffle_fewshot,
        "tasks": suite.hashes(),
    }


def settings_of(config: EvaluateConfig) -> dict[str, object]:
    """Return the settings that decide which questions are asked and how. The paths of data and model do not."""
    settings = task_settings(config)
    return {f.name: getattr(settings, f.name) for f in fields(TaskSettings) if f.name not in ("data_dir", "model")}


def write_metadata(folder: Path, content: EvalMetadata) -> None:
    """Write the metadata into a folder of records."""
    atomic.write(folder / FILE, (json.dumps(content, indent=1) + "\n").encode())


def read_metadata(folder: Path) -> EvalMetadata:
    """Return the metadata in a folder of records; empty where the records come without it."""
    path = folder / FILE
    return read_json_object(path) if path.is_file() else {}


def check_comparable(baseline: EvalMetadata, variant: EvalMetadata) -> None:
    """Refuse two evaluations with different tokenizers, few-shot settings or tasks. Entries of one side are ignored.

    Raises
    ------
    AlignmentError
        An entry differs; the message names it.
    """
    for part in sorted(baseline.keys() & variant.keys()):
        if baseline[part] != variant[part]:
            raise AlignmentError(
                f"The two evaluations differ in their {part}",
                allowed=str(baseline[part]),
                got=variant[part],
                fix="Evaluate both with the same tokenizer and settings",
            )
