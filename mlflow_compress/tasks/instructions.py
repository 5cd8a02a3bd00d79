"""Two-turn instructions in MT-Bench's schema: question_id, category, turns, and optionally reference answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlflow_compress.errors import DataError
from mlflow_compress.tasks.base import TaskSettings, limited
from mlflow_compress.tasks.files import read_jsonl


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction: what the user says in each turn, and reference answers where there are any."""

    item_id: str
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] = ()


def load_instructions(path: Path, settings: TaskSettings) -> list[Instruction]:
    """Read a JSONL file of instructions; `settings.limit` per category after a seeded shuffle."""
    rows = read_jsonl(path)
    seen: set[str] = set()
    for row in rows:
        place = f"{path}, line {row['line']}: "
        if "question_id" not in row or not isinstance(row.get("category"), str):
            raise DataError(f"{place}'question_id' and 'category' are needed")
        turns = row.get("turns")
        if not isinstance(turns, list) or len(turns) != 2 or not all(isinstance(t, str) and t.strip() for t in turns):
            raise DataError(f"{place}'turns' must be two texts that are not empty", got=turns)
        if str(row["question_id"]) in seen:
            raise DataError(f"{place}the question_id is used twice", got=row["question_id"])
        seen.add(str(row["question_id"]))
    return [
        Instruction(
            item_id=str(row["question_id"]),
            category=row["category"],
            turns=tuple(row["turns"]),
            reference=tuple(row.get("reference") or ()),
        )
        for row in limited(path.stem, rows, settings)
    ]
