"""Write the data files of the demonstration from a seed."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from mlflow_compress.items.contamination import CalibrationText, item_words
from mlflow_compress.items.task import FAMILIES, Task, TaskSettings

from .items import ROWS
from .training_text import PROSE, documents
from .world import World

SEED = 17
"""Seed of the committed files and of the committed model."""

CORPUS_CHARACTERS = 120_000
CALIBRATION_CHARACTERS = 290_000
CALIBRATION_DRAWN = 340_000
"""Characters drawn, of which documents that hold evaluated items are left out."""

FAMILY = {"choice.jsonl": "lettered", "cloze.jsonl": "cloze", "lastword.jsonl": "last_word", "exact.jsonl": "exact"}
"""Task family of the files whose rows are evaluated items."""


def _take(stream: Iterable[str], characters: int) -> list[str]:
    """Take documents until so many characters are reached."""
    taken: list[str] = []
    length = 0
    for document in stream:
        if length >= characters:
            return taken
        taken.append(document.strip("\n"))
        length += len(document) + 2
    raise ValueError(f"{characters} characters wanted, {length} found")


def _join(documents: Sequence[str]) -> str:
    """Join documents with one blank line."""
    return "\n\n".join(documents) + "\n"


def evaluated(world: World) -> list[Task]:
    """Return the items that are evaluated, as tasks."""
    return [
        task
        for name, family in FAMILY.items()
        for task in FAMILIES.get(family).build(name, list(ROWS[name](world)), TaskSettings())
    ]


def apart(drawn: Sequence[str], tasks: Sequence[Task]) -> list[str]:
    """Return the documents that hold none of the items, by the rule that calibration text is held to."""
    whole = CalibrationText.of([paragraph for document in drawn for paragraph in document.split("\n\n")])
    held = [item for task in tasks for _, item in item_words(task) if whole.holds(item)]
    texts = [CalibrationText.of(document.split("\n\n")) for document in drawn]
    return [d for d, text in zip(drawn, texts, strict=True) if not any(text.holds(item) for item in held)]


def corpus(world: World) -> str:
    """Return held-out prose, one paragraph per document."""
    stream = documents(world, "corpus", kinds=PROSE, evaluation=True)
    return _join(_take((document for _, document in stream), CORPUS_CHARACTERS))


def calibration(world: World) -> str:
    """Return text of the training distribution from a random stream of its own, without the evaluated items."""
    drawn = _take((document for _, document in documents(world, "calibration")), CALIBRATION_DRAWN)
    return _join(_take(apart(drawn, evaluated(world)), CALIBRATION_CHARACTERS))


def data_files(seed: int = SEED) -> dict[str, str]:
    """Return the content of every generated data file by its name."""
    world = World(seed)
    written = {
        name: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows(world)) for name, rows in ROWS.items()
    }
    return {**written, "corpus.txt": corpus(world), "calibration.txt": calibration(world)}


def write_data_files(folder: Path, seed: int = SEED) -> None:
    """Write every generated data file into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in data_files(seed).items():
        (folder / name).write_text(content, encoding="utf-8", newline="\n")
