"""Writes a blind sheet of a variant's and its baseline's answers, and its key."""

from __future__ import annotations

import re
import secrets
import tempfile
from pathlib import Path

from mlflow_compress import atomic
from mlflow_compress.config import BlindConfig
from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.reporting.answers.rating_sheet import rating_csv, rating_page
from mlflow_compress.results import BlindSheet
from mlflow_compress.stages.judging.answers_artifact import read_answers
from mlflow_compress.stages.rating.rating_key import drawn_sheet
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.store import Store
from mlflow_compress.tracking.tracker import Tracker

FOR_RATERS, PAGE, TABLE, KEY = "for_raters", "rate.html", "answers.csv", "key.json"
ACCEPTED = "the id of a main run or of a judge run"


def run_blind(config: BlindConfig, store: Store | None = None) -> BlindSheet:
    """Write page, table and key into a new folder, and return where they are.

    Raises
    ------
    ConfigError
        The run has no answers, or the folder has something in it already.
    DataError
        All answers are identical, so there is nothing to rate.
    TrackingError
        The store has no such run, or its answers cannot be read.
    """
    given, folder = config.run, Path(config.output).expanduser().resolve()
    if given is None or not re.fullmatch("[0-9a-f]{32}", given):
        raise ConfigError("There is no run of this name", allowed=ACCEPTED, got=given)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fix = "Give another folder: a sheet is never written over, because its key reads the ratings"
        raise ConfigError("There is something at this place already", got=str(folder), fix=fix)
    if not folder.parent.is_dir():
        raise ConfigError("The folder above it does not exist", got=str(folder.parent), fix="Make it first")
    tracker = Tracker(config.experiment) if store is None else None
    store = store if store is not None else tracker
    assert store is not None
    judge = store.look_up(store.child_ids(given).get("judge", given))
    if judge.tags.get(run_names.STAGE) != "judge":
        raise ConfigError("This run has no answers to instructions", allowed=ACCEPTED, got=given)
    sheet, rows, key = drawn_sheet(
        read_answers(store, judge.run_id),
        run=given,
        baseline=judge.tags[run_names.BASE_MODEL],
        variant=judge.tags[run_names.VARIANT],
        seed=secrets.randbits(128) if config.seed == "auto" else config.seed,
        limit=config.limit,
    )
    if not rows:
        raise DataError("All these answers are identical: there is nothing to rate", got=given)
    # Complete or not at all: a sheet without its key is worth nothing.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / "made"
        (made / FOR_RATERS).mkdir(parents=True)
        (made / FOR_RATERS / PAGE).write_text(rating_page(sheet, rows), encoding="utf-8")
        (made / FOR_RATERS / TABLE).write_text(rating_csv(rows), encoding="utf-8-sig", newline="")
        (made / KEY).write_text(key.model_dump_json(indent=1) + "\n", encoding="utf-8")
        atomic.rename(made, folder)
    if tracker is not None:
        tracker.note_given_run(f"blind {key.variant} {key.baseline}", f"Wrote {len(rows)} pairs to {folder}.")
    return BlindSheet(folder=folder, n_pairs=len(rows), n_identical=len(key.identical))
