"""Small task files."""

import json
from collections.abc import Iterable, Mapping
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
