"""Write the data files of the demonstration from a seed."""

import json
from collections.abc import Iterator
from pathlib import Path

from .items import ROWS
from .training_text import PROSE, documents
from .world import World

SEED = 17
"""Seed of the committed files and of the committed model."""

CORPUS_CHARACTERS = 120_000
CALIBRATION_CHARACTERS = 290_000


def _take(stream: Iterator[tuple[str, str]], characters: int) -> str:
    """Join documents with one blank line until so many characters are reached."""
    taken: list[str] = []
    length = 0
    while length < characters:
        _, document = next(stream)
        taken.append(document.strip("\n"))
        length += len(document) + 2
    return "\n\n".join(taken) + "\n"


def corpus(world: World) -> str:
    """Return held-out prose, one paragraph per document."""
    return _take(documents(world, "corpus", kinds=PROSE, evaluation=True), CORPUS_CHARACTERS)


def calibration(world: World) -> str:
    """Return text of the training distribution from a random stream of its own."""
    return _take(documents(world, "calibration"), CALIBRATION_CHARACTERS)


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
