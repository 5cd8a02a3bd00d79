"""Answers for people to rate, without names, and what their ratings say. Sheet, key and votes are files."""

import csv
import hashlib
import io
import json
import os
import re
import secrets
import tempfile
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ValidationError

from mlflow_compress import files as atomic
from mlflow_compress.commands.judge.answers_artifact import read_answers
from mlflow_compress.commands.rate.parameters import BlindConfig, RatingsConfig
from mlflow_compress.commands.shared.tabular import Tabular, aligned_lines, lines_of_run
from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics.core.metric_inputs import MetricSettings
from mlflow_compress.metrics.raters import Preference, preference_shares, rater_agreement, won_and_lost
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.answers_page import CHOICES, ComparedAnswer, RatingPair, rating_csv, rating_page
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.store import RunLink, Store, run_of_stage
from mlflow_compress.tracking.tracker import Tracker

FOR_RATERS, PAGE, TABLE, KEY = "for_raters", "rate.html", "answers.csv", "key.json"


@dataclass(frozen=True, kw_only=True)
class BlindSheet(Tabular):
    """What `blind` wrote."""

    folder: Path  # The folder with `for_raters` and `key.json`
    n_pairs: int  # Pairs to rate
    n_identical: int  # Pairs of identical answers, which are ties and need no rating

    @property
    def for_raters(self) -> Path:
        """The folder to give to raters: a page and a CSV file with the same pairs."""
        return self.folder / FOR_RATERS

    @property
    def key(self) -> Path:
        """The file that says whose answers they are. Keep it from raters."""
        return self.folder / KEY

    @property
    def summary(self) -> str:
        same = f", {self.n_identical} more are identical and count as ties" if self.n_identical else ""
        return f"{self.n_pairs} {'pair' if self.n_pairs == 1 else 'pairs'} to rate{same}."

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per file, and who may see it."""
        files = {PAGE: "raters, in a browser", TABLE: "raters, in a spreadsheet"}
        rows = [{"file": str(self.for_raters / name), "for": whom} for name, whom in files.items()]
        return [*rows, {"file": str(self.key), "for": "you alone"}]

    def as_text(self) -> str:
        files = [(f"For {row['for']}:", row["file"]) for row in self.to_rows()]
        return "\n".join([self.summary, *aligned_lines(files)])


@dataclass(frozen=True, kw_only=True)
class HumanRatings(Tabular):
    """What people prefer."""

    # The models
    baseline: str
    variant: str
    results: tuple[MetricResult, ...]  # All raters together, by category, by rater (`task`), and their agreement
    missing: Mapping[str, int]  # Rows that each rater has not rated
    n_identical: int  # Pairs of identical answers, a tie of every rater
    run: RunLink | None = None  # The run to which the results were logged

    @property
    def pooled(self) -> dict[str, MetricResult]:
        return {result.name: result for result in self.results if result.task is None and result.category is None}

    def __getitem__(self, metric: str) -> MetricResult:
        """Return a result of all raters together; one that there is not is a `ConfigError`."""
        if metric not in self.pooled:
            raise ConfigError("The ratings do not give this metric", allowed=sorted(self.pooled), got=metric)
        return self.pooled[metric]

    @property
    def summary(self) -> str:
        rate = self["human/win_rate"]
        interval = "" if rate.low is None else f" [{rate.low:.3f}, {rate.high:.3f}]"
        return (
            f"{self.variant} against {self.baseline}: win rate {rate.value:.3f}{interval} in {rate.n} ratings of "
            f"{len(self.missing)} {'rater' if len(self.missing) == 1 else 'raters'}, ties counting half"
        )

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per result; `task` is the rater, or a pair of raters."""
        return [asdict(result) for result in self.results]

    def as_text(self) -> str:
        rows = [
            (
                f"{result.name}{f' ({result.task})' if result.task else ''}",
                f"{result.value:.3f}",
                "" if result.low is None else f"[{result.low:.3f}, {result.high:.3f}]",
                f"n {result.n}",
            )
            for result in self.results
            if result.category is None
        ]
        lines = [f"{self.summary}.", "", *aligned_lines(rows)]
        if self.n_identical:
            lines.append(f"{self.n_identical} pairs of identical answers are ties of every rater.")
        lines += [f"{rater} has not rated {n} of the pairs." for rater, n in self.missing.items() if n]
        return "\n\n".join(["\n".join(lines), *lines_of_run(self.run)])


class RatedTurn(BaseModel, frozen=True, extra="forbid"):
    """A turn of an instruction that both models answered."""

    item_id: str
    turn: int
    category: str


class KeyRow(RatedTurn, frozen=True):
    """A row of the sheet, and the side of the variant's answer."""

    id: str
    variant: Literal["A", "B"]


class RatingKey(BaseModel, frozen=True, extra="forbid"):
    """What the sheet does not say."""

    run: str  # The run that was asked for
    baseline: str  # The models' names
    variant: str
    seed: int  # Seed of the order and of the sides
    rows: list[KeyRow]  # The rows of the sheet
    identical: list[RatedTurn]  # Pairs that are no rows, because both answers are the same: ties

    @classmethod
    def read(cls, path: Path) -> "RatingKey":
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

    - `limit`: Number of pairs to draw; 0 takes all. Pairs of identical answers are drawn too: they are ties, and no
      rows.
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
        a, b = tuple(turn.baseline for turn in turns), tuple(turn.variant for turn in turns)
        first = bool(rng.integers(2))  # whether the variant is A
        if first:
            a, b = b, a
        questions = tuple(turn.question for turn in turns)
        rows.append(RatingPair(id="", category=pair.category, questions=questions, a=a, b=b))
        turns_of.append((pair, "A" if first else "B"))
    # The name follows from what raters see, so that ratings of another sheet are noticed.
    seen = [[row.questions, row.a, row.b] for row in rows]
    sheet = "s" + hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:8]
    rows = [replace(row, id=f"{sheet}-{number:03}") for number, row in enumerate(rows, start=1)]
    keys = [
        KeyRow(id=row.id, item_id=pair.item_id, turn=pair.turn, category=pair.category, variant=side)
        for row, (pair, side) in zip(rows, turns_of, strict=True)
    ]
    key = RatingKey(run=run, baseline=baseline, variant=variant, seed=seed, rows=keys, identical=identical)
    return sheet, rows, key


_NAMED = 10  # rows that an error names
_RATER = re.compile(r"[\w.-]+", re.ASCII)


def read_ratings(files: Sequence[Path], ids: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return each rater's choice of each row; a row without a choice is not there. A rater is named as the file.

    - `files`: CSV files with the columns `id` and `choice`, separated by comma, semicolon or tab; others are not read.
    """
    ratings: dict[str, dict[str, str]] = {}
    problems: list[str] = []
    for path in files:
        rater = path.stem
        if not path.is_file():
            raise ConfigError("There is no such file of ratings", got=str(path))
        if not _RATER.fullmatch(rater):
            allowed = "letters, digits, and - _ . in the name of a file, which becomes the rater's name"
            raise ConfigError("A rater's name cannot be part of a metric's name", allowed=allowed, got=path.name)
        if rater in ratings:
            raise ConfigError("Two files of ratings have one name, which is the rater's", got=path.name)
        ratings[rater] = _read(path, set(ids), problems)
        if not ratings[rater] and not problems:
            raise DataError("No row of this file has a choice", allowed=CHOICES, got=path.name)
    if problems:
        more = f", and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise DataError(
            f"{len(problems)} {'row' if len(problems) == 1 else 'rows'} of ratings cannot be used: "
            f"{'; '.join(problems[:_NAMED])}{more}",
            fix="Correct the file. Nothing was counted",
        )
    return ratings


def _read(path: Path, ids: set[str], problems: list[str]) -> dict[str, str]:
    """Return a rater's choices, and add what is wrong to `problems`."""
    # Spreadsheets write other encodings too. What is read here, ids and choices, is ASCII in all of them.
    text = path.read_bytes().decode("utf-8-sig", errors="replace")
    separator = next((sign for sign in ",;\t" if sign in text.partition("\n")[0]), ",")
    choices = {choice.lower(): choice for choice in CHOICES}
    choices_by_row: dict[str, str] = {}
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
                choices_by_row[row_id] = choices[given.lower()]
            lines.setdefault(row_id, rows.line_num)
    except csv.Error as error:
        raise DataError(f"A file of ratings is no CSV: {error}", got=path.name) from error
    return choices_by_row


ACCEPTED = "the id of a main run or of a judge run"


def run_blind(config: BlindConfig, store: Store | None = None) -> BlindSheet:
    """Write page, table and key into a new folder, and return where they are."""
    run_name, folder = config.run, Path(config.output).expanduser().resolve()
    if run_name is None:
        raise ConfigError("There is no run of this name", allowed=ACCEPTED, got=run_name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fix = "Give another folder: a sheet is never written over, because its key reads the ratings"
        raise ConfigError("There is something at this place already", got=str(folder), fix=fix)
    if not folder.parent.is_dir():
        raise ConfigError("The folder above it does not exist", got=str(folder.parent), fix="Make it first")
    store = store if store is not None else Tracker(config.experiment)
    run = store.look_up(run_name)
    judge = run_of_stage(store, run.run_id, "judge")
    if judge.tags.get(run_names.STAGE) != "judge":
        raise ConfigError("This run has no answers to instructions", allowed=ACCEPTED, got=run_name)
    sheet, rows, key = drawn_sheet(
        read_answers(store, judge.run_id),
        run=run.run_id,
        baseline=judge.tags[run_names.BASE_MODEL],
        variant=judge.tags[run_names.VARIANT],
        seed=secrets.randbits(128) if config.seed == "auto" else config.seed,
        limit=config.limit,
    )
    if not rows:
        raise DataError("All these answers are identical: there is nothing to rate", got=run_name)
    # Complete or not at all: a sheet without its key is worth nothing.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / "made"
        (made / FOR_RATERS).mkdir(parents=True)
        (made / FOR_RATERS / PAGE).write_text(rating_page(sheet, rows), encoding="utf-8")
        (made / FOR_RATERS / TABLE).write_text(rating_csv(rows), encoding="utf-8-sig", newline="")
        (made / KEY).write_text(key.model_dump_json(indent=1) + "\n", encoding="utf-8")
        atomic.rename(made, folder)
    if isinstance(store, Tracker):
        store.note_given_run(f"blind {key.variant} {key.baseline}", f"Wrote {len(rows)} pairs to {folder}.")
    return BlindSheet(folder=folder, n_pairs=len(rows), n_identical=len(key.identical))


PREFIX = "human/"
_VALUES = {"variant": 1.0, "baseline": 0.0}  # of who is preferred; anything else is a tie


def run_ratings(config: RatingsConfig, store: Store | None = None) -> HumanRatings:
    """Return what the raters' files say; with `log`, log it to the run whose answers were rated."""
    if config.files is None:
        raise ConfigError("No file of ratings is given", fix="Give the files: ratings FILE [FILE ...] --key KEY")
    key = RatingKey.read(Path(config.key))
    files = [Path(part.strip()) for part in config.files.split(",")]
    ratings = read_ratings(files, [row.id for row in key.rows])
    results = tuple(rating_results(key, ratings, MetricSettings(seed=config.seed)))
    link = None
    if config.log or "MLFLOW_RUN_ID" in os.environ:  # otherwise no store is opened
        store = store if store is not None else Tracker(config.experiment)
        if isinstance(store, Tracker):
            store.note_given_run(f"ratings {key.variant} {key.baseline}", f"Ratings by {', '.join(ratings)}.")
    if config.log and store is not None:
        run = store.add_to(key.run)
        run.log_results([result for result in results if result.category is None])
        rows = [
            {"rater": rater, "item_id": row.item_id, "turn": row.turn, "choice": _preferred(row, choices[row.id])}
            for rater, choices in ratings.items()
            for row in key.rows
            if row.id in choices
        ]
        run.log_json(rows, "human_ratings.json")
        link = store.link(key.run)
    missing = {rater: len(key.rows) - len(choices) for rater, choices in ratings.items()}
    return HumanRatings(
        baseline=key.baseline,
        variant=key.variant,
        results=results,
        missing=missing,
        n_identical=len(key.identical),
        run=link,
    )


def rating_results(
    key: RatingKey, ratings: Mapping[str, Mapping[str, str]], settings: MetricSettings
) -> list[MetricResult]:
    """Return the results of all raters together, by category and by rater, and how far the raters agree.

    `human/win_rate` is defined as `judge/win_rate`: the share of answers in which the variant's is preferred, and a tie
    counts half. "Both bad" is a tie, and `human/both_bad` its share. Identical answers are a tie of every rater. A row
    that a rater has not rated counts as unscored. Every rating counts alike. Intervals: see `preference_interval`.
    """
    each = {rater: _preferences(key, choices) for rater, choices in ratings.items()}
    results = preference_shares([one for part in each.values() for one in part], settings, prefix=PREFIX)
    if len(each) > 1:
        for rater, part in each.items():
            of_rater = preference_shares(part, settings, prefix=PREFIX)
            results += [replace(result, task=rater) for result in of_rater if result.category is None]
    values: dict[str, dict[Hashable, float]] = {
        rater: {
            (row.item_id, row.id): _VALUES.get(_preferred(row, choices[row.id]), 0.5)
            for row in key.rows
            if row.id in choices
        }
        for rater, choices in ratings.items()
    }
    kappa, alpha = f"{PREFIX}agreement_kappa", f"{PREFIX}agreement_alpha"
    return results + rater_agreement(values, lambda rated: rated[0], settings, kappa=kappa, alpha=alpha)


def _preferred(row: KeyRow, choice: str) -> str:
    """Return a choice by the model's part; what is no side stays as it is."""
    if choice not in ("A", "B"):
        return choice
    return "variant" if choice == row.variant else "baseline"


def _preferences(key: RatingKey, choices: Mapping[str, str]) -> list[Preference]:
    """Return a rater's verdicts on all pairs, identical ones included."""
    preferences = []
    for row in key.rows:
        adds = None
        if (choice := choices.get(row.id)) is not None:
            adds = {**won_and_lost(_VALUES.get(_preferred(row, choice), 0.5)), "both_bad": float(choice == "both bad")}
        preferences.append(Preference(row.item_id, row.category, adds))
    tie = {**won_and_lost(0.5), "both_bad": 0.0}
    return [*preferences, *(Preference(pair.item_id, pair.category, tie) for pair in key.identical)]
