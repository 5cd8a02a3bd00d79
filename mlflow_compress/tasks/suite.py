"""From `-P tasks=` to tasks: names of embedded suites and files, comma-separated."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from mlflow_compress import demo
from mlflow_compress.config import EMBEDDED
from mlflow_compress.errors import ConfigError
from mlflow_compress.records import Items, Request
from mlflow_compress.tasks.base import Task, TaskSettings
from mlflow_compress.tasks.files import read_questions, read_text


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text whose tokens are scored in windows."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Everything that is evaluated in one go."""

    tasks: tuple[Task, ...]
    corpora: tuple[Corpus, ...]

    @property
    def items(self) -> Items:
        """All items of all tasks."""
        return Items.concat([task.items for task in self.tasks])

    @property
    def requests(self) -> list[Request]:
        """All requests of all tasks, for one pass."""
        return [request for task in self.tasks for request in task.requests]

    def hashes(self) -> dict[str, str]:
        """Return a SHA-256 of the content of every task and corpus."""
        found = {task.name: task.content_hash() for task in self.tasks}
        return found | {c.name: hashlib.sha256(c.text.encode()).hexdigest() for c in self.corpora}


def resolve(name: str, value: str, *, model: str, embedded: Path) -> Path:
    """Turn a parameter that is 'auto', 'demo' or a path into a path; 'auto' is the demo's, for the demo model only."""
    if value == EMBEDDED or (value == "auto" and model == EMBEDDED):
        return embedded
    if value == "auto":
        raise ConfigError(f"Parameter '{name}' has a default for the demo model only", fix=f"Give -P {name}=FILE")
    if not Path(value).is_file():
        raise ConfigError(f"Parameter '{name}' names no file", allowed=f"'{EMBEDDED}' or a path", got=value)
    return Path(value)


def _files(spec: str, model: str) -> list[tuple[str, Path]]:
    """Expand the comma-separated parameter into (task name, file)."""
    if spec == "auto" and model != EMBEDDED:
        raise ConfigError("Parameter 'tasks' has a default for the demo model only", fix="Give -P tasks=demo or files")
    files: list[tuple[str, Path]] = []
    for part in [EMBEDDED] if spec == "auto" else [p.strip() for p in spec.split(",")]:
        if part == EMBEDDED:
            stems = ("choice.jsonl", "cloze.jsonl", "lastword.jsonl", "exact.jsonl", "corpus.txt")
            files += [(f"demo_{Path(stem).stem}", demo.DATA_DIR / stem) for stem in stems]
        elif Path(part).suffix in (".jsonl", ".txt"):
            files.append((Path(part).stem, Path(part)))
        else:
            raise ConfigError("Unknown task", allowed=f"'{EMBEDDED}', files ending in .jsonl or .txt", got=part)
    names = [name for name, _ in files]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError("Two tasks have the same name", got=twice, fix="Rename one of the files")
    return files


def load_suite(spec: str, *, model: str, settings: TaskSettings) -> Suite:
    """Read and check everything that `spec` names, before any model is loaded.

    Parameters
    ----------
    spec : str
        'auto', or names and files separated by commas: 'demo', *.jsonl (the fields decide the family), *.txt (corpus).
    model : str
        The baseline parameter; 'auto' tasks exist for the demo only.
    settings : TaskSettings
        Shots, shuffles, seed and limit.

    Raises
    ------
    ConfigError, DataError
        Unknown names, broken files (with file and line).
    """
    tasks: list[Task] = []
    corpora: list[Corpus] = []
    for name, path in _files(spec, model):
        if path.suffix == ".txt":
            corpora.append(Corpus(name=name, text=read_text(path)))
        else:
            family, rows = read_questions(path)
            tasks += family.build(name, rows, settings)
    return Suite(tasks=tuple(tasks), corpora=tuple(corpora))
