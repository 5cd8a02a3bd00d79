"""Small task files."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def sums(n: int, **fields: Any) -> list[dict[str, Any]]:
    """Return `n` cloze questions, but for the given fields."""
    row = {"category": "c", "choices": ["two", "four"]}
    return [{"id": str(i), "context": f"{i} plus {i} is", "answer": i % 2, **row, **fields} for i in range(n)]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Write rows as lines of JSON, and return the path as commands take it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def hub_set(folder: Path, dataset: str, configs: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> None:
    """Write a data set as the hub has them: rows by configuration and split, and a card that names their files."""
    place, card = folder / dataset, []
    for config, splits in configs.items():
        (place / config).mkdir(parents=True)
        for split, rows in splits.items():
            write_rows(place / config / f"{split}-00000-of-00001.jsonl", rows)
        files = [{"split": split, "path": f"{config}/{split}-*"} for split in splits]
        card.append({"config_name": config, "data_files": files})
    (place / "README.md").write_text(f"---\n{json.dumps({'configs': card})}\n---\n")
