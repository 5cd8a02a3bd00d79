"""Reads raters' CSV files, and names every row that cannot be used."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.reporting.answers.rating_sheet import CHOICES

_NAMED = 10  # rows that an error names
_RATER = re.compile(r"[\w.-]+", re.ASCII)


def read_ratings(files: Sequence[Path], ids: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return each rater's choice of each row; a row without a choice is not there. A rater is named as the file.

    Parameters
    ----------
    files : sequence of Path
        CSV files with the columns `id` and `choice`, separated by comma, semicolon or tab; others are not read.
    ids : sequence of str
        The rows of the sheet.

    Raises
    ------
    ConfigError
        There is no such file, or two have one name.
    DataError
        A row has an unknown id or choice, or is there twice; or a file has no choice at all.
    """
    found: dict[str, dict[str, str]] = {}
    problems: list[str] = []
    for path in files:
        rater = path.stem
        if not path.is_file():
            raise ConfigError("There is no such file of ratings", got=str(path))
        if not _RATER.fullmatch(rater):
            allowed = "letters, digits, and - _ . in the name of a file, which becomes the rater's name"
            raise ConfigError("A rater's name cannot be part of a metric's name", allowed=allowed, got=path.name)
        if rater in found:
            raise ConfigError("Two files of ratings have one name, which is the rater's", got=path.name)
        found[rater] = _read(path, set(ids), problems)
        if not found[rater] and not problems:
            raise DataError("No row of this file has a choice", allowed=CHOICES, got=path.name)
    if problems:
        more = f", and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise DataError(
            f"{len(problems)} {'row' if len(problems) == 1 else 'rows'} of ratings cannot be used: "
            f"{'; '.join(problems[:_NAMED])}{more}",
            fix="Correct the file. Nothing was counted",
        )
    return found


def _read(path: Path, ids: set[str], problems: list[str]) -> dict[str, str]:
    """Return a rater's choices, and add what is wrong to `problems`."""
    # Spreadsheets write other encodings too. What is read here, ids and choices, is ASCII in all of them.
    text = path.read_bytes().decode("utf-8-sig", errors="replace")
    separator = next((sign for sign in ",;\t" if sign in text.partition("\n")[0]), ",")
    choices = {choice.lower(): choice for choice in CHOICES}
    found: dict[str, str] = {}
    lines: dict[str, int] = {}
    try:
        rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
        if not {"id", "choice"} <= set(rows.fieldnames or ()):
            raise DataError("A file of ratings needs the columns id and choice", got=f"{path.name}: {rows.fieldnames}")
        for row in rows:
            where = f"{path.name}, line {rows.line_num}"
            row_id, given = (row["id"] or "").strip(), (row["choice"] or "").strip()
            if row_id not in ids:
                problems.append(f"{where}: unknown id {row_id!r}")
            elif row_id in lines:
                problems.append(f"{where}: {row_id} is in line {lines[row_id]} already")
            elif given and given.lower() not in choices:
                problems.append(f"{where}: unknown choice {given!r} (allowed: {', '.join(CHOICES)})")
            elif given:
                found[row_id] = choices[given.lower()]
            lines.setdefault(row_id, rows.line_num)
    except csv.Error as error:
        raise DataError(f"A file of ratings is no CSV: {error}", got=path.name) from error
    return found
