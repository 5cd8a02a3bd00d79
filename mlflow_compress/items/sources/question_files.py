"""Reads and checks question files (JSONL). Every error has file and line."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mlflow_compress.errors import ConfigError, DataError, nearest, raise_together
from mlflow_compress.files import parse_json
from mlflow_compress.items.task import FAMILIES, Corpus, Family, Parts, Row, TaskSettings, check_tasks

MAX_CHARS = 500_000  # longest text of a question; longer ones come from a file without line breaks

MAX_NAME = 100  # characters; MLflow's metric names have at most 250, and begin with "<section>/<metric>/"
RESERVED = ("options", "generated")  # names of folders of unfinished results, next to those of corpora
_NAME = re.compile(r"[^\W_][\w.\- ]*")  # what MLflow allows in the name of a metric

_NAMES = {str: "a text", int: "a whole number", list: "a list"}


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file. A file that cannot be read is a `DataError`."""
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        raise DataError(f"Cannot read the file: {getattr(error, 'strerror', None) or error}", got=str(path)) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not UTF-8 (byte {error.start} of the file)") from error
    if not text.strip():
        raise DataError("The file is empty", got=str(path))
    return text


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file; blank lines are skipped. The first line that is no object is a `DataError`."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):  # other line separators may be part of a text
        if line.strip():
            yield _object(line, f"{path}, line {number}")


def _object(line: str, place: str) -> dict[str, Any]:
    row = parse_json(line, source=place)
    if not isinstance(row, dict):
        raise DataError(f"{place}: not a JSON object", got=type(row).__name__)
    return row


def _parsed(path: Path) -> tuple[list[dict[str, Any]], dict[int, DataError]]:
    """Return the objects of a JSONL file, each with its line number under "line", and what is wrong, by line."""
    rows: list[dict[str, Any]] = []
    errors: dict[int, DataError] = {}
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append({**_object(line, f"{path}, line {number}"), "line": number})
        except DataError as error:
            errors[number] = error
    return rows, errors


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file, each with its line number under "line"; blank lines are skipped."""
    rows, errors = _parsed(path)
    raise_together(list(errors.values()))
    return rows


def _answer_index(place: str, row: dict[str, Any]) -> None:
    answer, choices = row.get("answer"), row.get("choices")
    if not (isinstance(answer, str) and len(answer) == 1 and "A" <= answer <= "Z" and isinstance(choices, list)):
        return
    index = ord(answer) - ord("A")
    if index >= len(choices):
        last = chr(ord("A") + len(choices) - 1)
        raise DataError(f"{place}'answer' is a letter outside the options", allowed=f"A to {last}", got=answer)
    row["answer"] = index


def _check_row(place: str, row: dict[str, Any], family: Family, seen: set[str]) -> None:
    place = f"{place}: "
    for name, value in row.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and len(text) > MAX_CHARS:
                allowed = f"at most {MAX_CHARS:,} characters"
                raise DataError(f"{place}'{name}' is too long", allowed=allowed, got=f"{len(text):,} characters")
    _answer_index(place, row)
    optional = {name: kind for name, kind in {"group_id": str, **family.optional}.items() if name in row}
    for name, kind in {"id": str, "category": str, **family.fields, **optional}.items():
        if name not in row:
            raise DataError(f"{place}the field '{name}' is missing")
        if not isinstance(row[name], kind) or isinstance(row[name], bool):
            raise DataError(f"{place}'{name}' has the wrong type", allowed=_NAMES[kind], got=row[name])
    for name, kind in {"id": str, **family.fields}.items():
        if kind is str and not row[name].strip():
            raise DataError(f"{place}'{name}' must not be empty")
    choices = row.get("choices")
    if isinstance(choices, list) and all(isinstance(c, str) for c in choices) and len(set(choices)) < len(choices):
        raise DataError(f"{place}'choices' holds a choice twice, so no answer could be right", got=choices)
    if row["id"] in seen:
        raise DataError(f"{place}the id is used twice", got=row["id"])
    seen.add(row["id"])
    try:
        family.check(row)
    except DataError as error:
        raise DataError(f"{place}{error}") from error


def _read_questions(path: Path) -> tuple[str, Sequence[Row]]:
    """Return the name of the family of a question file, and its checked rows."""
    rows, errors = _parsed(path)
    if not rows:
        raise_together(list(errors.values()))
    return _checked(rows, errors, lambda line: f"{path}, line {line}"), rows


def check_rows(rows: Sequence[Row], where: str) -> None:
    """Refuse rows in memory that a question file could not hold; `where` is what the caller calls them."""
    _checked([{**row, "line": number} for number, row in enumerate(rows)], {}, lambda number: f"{where}[{number}]")


def _checked(rows: Sequence[dict[str, Any]], errors: dict[int, DataError], place: Callable[[int], str]) -> str:
    """Return the family of rows; what is wrong in them is raised with `errors`, each with its place by its "line"."""
    # If several families fit, it is the one that has the fields of all of them.
    fits = {name: family for name, family in FAMILIES.items() if set(family.fields) <= set(rows[0])}
    wanted = {field for family in fits.values() for field in family.fields}
    fits = {name: family for name, family in fits.items() if wanted <= {*family.fields, *family.optional}}
    if len(fits) != 1:
        raise DataError(
            f"{place(rows[0]['line'])}: the fields do not identify the task family",
            allowed=[f"{name}: {'+'.join(family.fields)}" for name, family in FAMILIES.items()],
            got=sorted(set(rows[0]) - {"line"}),
            fix=_meant(set(rows[0]) - {"line"}),
        )
    name = next(iter(fits))
    seen: set[str] = set()
    with FAMILIES.blaming(name):
        for row in rows:
            try:
                _check_row(place(row["line"]), row, FAMILIES.get(name), seen)
            except DataError as error:
                errors[row["line"]] = error
    raise_together([errors[line] for line in sorted(errors)])
    if all(row.get("split") == "dev" for row in rows):
        what = "Every row is a few-shot example (split 'dev')"
        raise DataError(what, got=place(rows[0]["line"]), fix="Add rows of split 'test'")
    return name


# What other formats call our fields; no edit of a few letters leads from one to the other.
_ELSEWHERE = {"options": "choices", "label": "answer", "gold": "answer", "instruction": "question", "input": "question"}


def _meant(given: set[str]) -> str | None:
    """Return the question which field was meant, for every name that no family has and that is like one it has."""
    known = {field for _, family in FAMILIES.items() for field in (*family.fields, *family.optional)}
    near = [f"{field!r} for {name!r}" for name in sorted(given - known) for field in _likely(name, known - given)]
    return f"Did you mean {', '.join(near)}?" if near else None


def _likely(name: str, known: set[str]) -> list[str]:
    return [_ELSEWHERE[name]] if _ELSEWHERE.get(name) in known else nearest(name, known)


def file_task_name(path: Path) -> str:
    """Return the name of a file's task, which is part of metric names and folder names."""
    name = path.stem
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME or name in RESERVED:
        raise ConfigError(
            "This file's name cannot be that of a task",
            allowed=f"at most {MAX_NAME} letters, digits, '_', '-', '.' and blanks, the first a letter or digit, and "
            f"not {' or '.join(RESERVED)}",
            got=path.name,
            fix="Rename the file",
        )
    return name


def check_file(path: Path) -> None:
    """Refuse a file of items, or a corpus, that cannot be used: every wrong row is named."""
    file_task_name(path)
    read_text(path) if path.suffix == ".txt" else _read_questions(path)


def load_file(path: Path, settings: TaskSettings, *, name: str | None = None) -> Parts:
    """Return the corpus of a .txt file, or the tasks of a .jsonl file, whose fields decide the family."""
    name = name or file_task_name(path)
    if path.suffix == ".txt":
        return Parts(corpora=(Corpus(name=name, text=read_text(path)),))
    family, rows = _read_questions(path)
    with FAMILIES.blaming(family):
        tasks = FAMILIES.get(family).build(name, rows, settings)
    check_tasks(tasks, FAMILIES.origin(family))
    return Parts(tasks=tuple(tasks))
