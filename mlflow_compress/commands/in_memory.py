"""Writes what a Python user holds in memory - a loaded model, rows of items - into files, which every command takes."""

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mlflow_compress.config.policy import Policy, policy_of, policy_yaml
from mlflow_compress.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    ModelInMemory: TypeAlias = tuple[PreTrainedModel, PreTrainedTokenizerBase]
    Rows: TypeAlias = Sequence[Mapping[str, object]] | pd.DataFrame
    TaskRows: TypeAlias = Rows | Mapping[str, Rows]

TAKES_MODELS = ("model", "checkpoint")  # parameters that take a loaded model
_DEFAULT_NAME = "items"  # of a task whose rows are given without a name


def is_loaded_model(value: object) -> bool:
    """Return whether a value is a transformers model, or a pair of one and its tokenizer."""
    return hasattr(value[0] if isinstance(value, list | tuple) and value else value, "save_pretrained")


def is_rows(value: object) -> bool:
    """Return whether a value holds the rows of tasks: a list of dictionaries, a data frame, or a mapping to these."""
    if isinstance(value, Mapping):
        return True
    return hasattr(value, "to_dict") or (isinstance(value, list | tuple) and any(isinstance(v, Mapping) for v in value))


def save_loaded_model(parameter: str, value: Any, inputs: Path) -> Path:
    """Save a loaded model with its tokenizer as safetensors, and return the folder, which is one for the same model."""
    parts = value if isinstance(value, list | tuple) else (value,)
    # Both can be saved; weights are what a tokenizer does not have.
    saved = all(hasattr(part, "save_pretrained") for part in parts)
    if not saved or [hasattr(part, "state_dict") for part in parts] != [True, False]:
        raise ConfigError(
            f"Parameter '{parameter}' is not a loaded model followed by its tokenizer",
            allowed="a folder, a name on the hub, or (model, tokenizer)",
            got=", ".join(type(part).__name__ for part in parts),
            fix=f"Give {parameter}=(model, tokenizer), in this order",
        )
    model, tokenizer = parts
    name = re.sub(r"[^A-Za-z0-9.]+", "-", Path(str(model.config.name_or_path)).name).strip("-") or "model"
    inputs.mkdir(parents=True, exist_ok=True)

    with tempfile.TemporaryDirectory(dir=inputs) as scratch:
        written = Path(scratch) / name
        try:
            model.save_pretrained(written, safe_serialization=True)
            tokenizer.save_pretrained(written)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            raise ConfigError(
                f"The model of parameter '{parameter}' cannot be saved: {str(error).splitlines()[0]}",
                fix="Save it in a folder, and give the folder",
            ) from error
        if not (written / "config.json").is_file() or not any(written.glob("*.safetensors")):
            raise ConfigError(
                f"The model of parameter '{parameter}' saves no weights of its own",
                allowed="a complete model",
                got=type(model).__name__,
                fix="Merge an adapter into its model first (merge_and_unload)",
            )
        digest = hashlib.sha256()
        for file in sorted(written.iterdir()):
            with file.open("rb") as opened:
                digest.update(f"{file.name} {hashlib.file_digest(opened, 'sha256').hexdigest()}\n".encode())
        folder = inputs / f"{name}-{digest.hexdigest()[:8]}"
        if not folder.exists():
            shutil.move(written, folder)
    return folder


def checked_policy(value: Mapping[str, Any] | Policy) -> Policy:
    """Return the policy of a dictionary; one that cannot be used is a `ConfigError`."""
    return value if isinstance(value, Policy) else policy_of(value, "in parameter 'policy'")


def write_policy(policy: Policy, inputs: Path) -> Path:
    """Write a policy as the YAML file that every command reads, and return the file."""
    text = policy_yaml(policy, comments=False).encode()
    file = inputs / f"policy-{hashlib.sha256(text).hexdigest()[:12]}.yaml"
    inputs.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text)
    return file


def check_questions(value: Any) -> None:
    """Refuse rows that no family of questions takes. A message calls them as Python does: tasks['sums'][0]."""
    from mlflow_compress.items.sources.question_files import check_rows

    for name, lines in _task_lines(value).items():
        where = f"tasks[{name!r}]" if isinstance(value, Mapping) else "tasks"
        check_rows([json.loads(line) for line in lines], where)


def _task_lines(value: Any) -> dict[str, list[str]]:
    """Return the rows of every task as JSON, by its name."""
    tasks = value if isinstance(value, Mapping) else {_DEFAULT_NAME: value}
    by_name = {}
    for name, rows in tasks.items():
        if Path(str(name)).name != str(name):
            raise ConfigError("The name of a task cannot be a path", got=name)
        lines = [json.dumps(row, default=_plain, ensure_ascii=False) for row in _rows(rows)]
        if not lines:
            raise ConfigError("Parameter 'tasks' holds a task without rows", got=name, fix="Give it rows of items")
        by_name[str(name)] = lines
    if not by_name:
        raise ConfigError("Parameter 'tasks' names no task", fix="Give it rows of items by the name of their task")
    return by_name


def write_task_files(value: Any, inputs: Path) -> str:
    """Write the rows of every task in `inputs`, as JSON lines, and return the files, separated by commas."""
    files = []
    for name, lines in _task_lines(value).items():
        try:
            text = "".join(f"{line}\n" for line in lines).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"A text of task {name!r} is no Unicode: {error.reason}", got=ascii(error.object[error.start])
            ) from None
        file = inputs / hashlib.sha256(text).hexdigest()[:12] / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text)
        files.append(str(file))
    return ",".join(files)


def _rows(rows: Any) -> Sequence[Mapping[str, object]]:
    """Return rows as dictionaries; a field that a data frame has filled up with a missing value is left out."""
    if hasattr(rows, "to_dict"):
        frame, rows = rows, []
        for row in frame.to_dict("records"):
            values = {str(k): v.tolist() if hasattr(v, "tolist") else v for k, v in row.items()}
            rows.append({k: v for k, v in values.items() if v is not None and v == v})
    if not isinstance(rows, list | tuple) or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(
            "Parameter 'tasks' mixes rows of items with something else",
            allowed="names and files; or a list of dictionaries, a data frame, or {name: one of these}",
            got=type(rows).__name__,
        )
    return rows


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ConfigError("A row of 'tasks' has a value that JSON cannot store", got=type(value).__name__)
