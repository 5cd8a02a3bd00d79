"""Reads raters' CSV files, and names every row that cannot be used."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.reporting.answers_page import ComparedAnswer
from mlflow_compress.reporting.rating_sheet import CHOICES, RatingPair


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RatedTurn(_Frozen):
    """A turn of an instruction that both models answered."""

    item_id: str
    turn: int
    category: str


class KeyRow(RatedTurn):
    """A row of the sheet, and the side of the variant's answer."""

    id: str
    variant: Literal["A", "B"]


class RatingKey(_Frozen):
    """What the sheet does not say."""

    run: str  # The run that was asked for
    baseline: str  # The models' names
    variant: str
    seed: int  # Seed of the order and of the sides
    rows: list[KeyRow]  # The rows of the sheet
    identical: list[RatedTurn]  # Pairs that are no rows, because both answers are the same: ties

    @classmethod
    def read(cls, path: Path) -> RatingKey:
        """Read a key. No such file is a `ConfigError`, another content a `DataError`."""
        if not path.is_file():
            fix = "`blind` writes it: key.json, beside the folder for the raters"
            raise ConfigError("There is no key of a blind sheet", got=str(path), fix=fix)
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            what = error.errors(include_url=False, include_input=False)[0]["msg"]
            raise DataError(f"This is no key of a blind sheet: {what}", got=str(path)) from None


def drawn_sheet(
    pairs: Sequence[ComparedAnswer], *, run: str, baseline: str, variant: str, seed: int, limit: int = 0
) -> tuple[str, list[RatingPair], RatingKey]:
    """Return a sheet's name, its rows in a random order with random sides, and its key.

    Neither the name nor an id tells anything about a side: they follow from what the rater sees, and from the order.

    Parameters
    ----------
    limit : int
        Number of pairs to draw; 0 takes all. Pairs of identical answers are drawn too: they are ties, and no rows.
    """
    rng = np.random.default_rng(seed)
    by_turn = {(pair.item_id, pair.turn): pair for pair in pairs}
    ordered = sorted(by_turn)  # the order of the file is by grade, and must not show
    drawn = [by_turn[ordered[i]] for i in rng.permutation(len(ordered))[: limit or None]]
    rows: list[RatingPair] = []
    turns_of: list[tuple[ComparedAnswer, Literal["A", "B"]]] = []
    identical = []
    for pair in drawn:
        turns = [by_turn[pair.item_id, turn] for turn in range(pair.turn + 1)]
        if all(turn.baseline == turn.variant for turn in turns):
            identical.append(RatedTurn(item_id=pair.item_id, turn=pair.turn, category=pair.category))
            continue
        baseline_said, variant_said = (tuple(t.baseline for t in turns), tuple(t.variant for t in turns))
        first = bool(rng.integers(2))  # whether the variant is A
        a, b = (variant_said, baseline_said) if first else (baseline_said, variant_said)
        questions = tuple(turn.question for turn in turns)
        rows.append(RatingPair(id="", category=pair.category, questions=questions, a=a, b=b))
        turns_of.append((pair, "A" if first else "B"))
    sheet = _name(rows)
    rows = [replace(row, id=f"{sheet}-{number:03}") for number, row in enumerate(rows, start=1)]
    keys = [
        KeyRow(id=row.id, item_id=pair.item_id, turn=pair.turn, category=pair.category, variant=side)
        for row, (pair, side) in zip(rows, turns_of, strict=True)
    ]
    key = RatingKey(run=run, baseline=baseline, variant=variant, seed=seed, rows=keys, identical=identical)
    return sheet, rows, key


def _name(rows: Sequence[RatingPair]) -> str:
    """Return a short name that follows from what raters see, so that ratings of another sheet are noticed."""
    seen = [[row.questions, row.a, row.b] for row in rows]
    return "s" + hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:8]


_NAMED = 10  # rows that an error names
_RATER = re.compile(r"[\w.-]+", re.ASCII)


def read_ratings(files: Sequence[Path], ids: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return each rater's choice of each row; a row without a choice is not there. A rater is named as the file.

    Parameters
    ----------
    files : sequence of Path
        CSV files with the columns `id` and `choice`, separated by comma, semicolon or tab; others are not read.

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
