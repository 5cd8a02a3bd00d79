"""The report stage: one page over the variants of an evaluation, read from their runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from mlflow_compress import atomic
from mlflow_compress.config import ReportConfig, check_text
from mlflow_compress.decide.scoreboard import Scoreboard, ScoredVariant
from mlflow_compress.errors import ConfigError
from mlflow_compress.reporting.page.page_content import PageContent
from mlflow_compress.reporting.page.page_text import content_values, page_markdown
from mlflow_compress.reporting.page.variants_page import render_page
from mlflow_compress.reporting.scoreboard_text import scoreboard_csv
from mlflow_compress.results import VariantsReport
from mlflow_compress.stages.side_by_side.page_reading import page_content
from mlflow_compress.stages.side_by_side.score_runs import score_runs
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker

SCOREBOARD = "scoreboard.json"  # artifact of a sweep's run
_ACCEPTED = "ids of main runs of one evaluation, or of a sweep's run"


def run_report(config: ReportConfig) -> VariantsReport:
    """Write the page over variants, or its tables, and return them. Inside `mlflow run`, the file is logged too.

    Raises
    ------
    ConfigError
        No run is given; a run is no main run and no sweep; runs were evaluated differently; the format is unknown.
    TrackingError
        The store has no such run, or its results cannot be read.
    """
    path = Path(config.output).expanduser().resolve()
    text_of = _writer(config.format, path)
    given = [run_id.strip() for run_id in (config.runs or "").split(",") if run_id.strip()]
    if not given:
        raise ConfigError("No run to report on", allowed=_ACCEPTED, fix="Give the ids of runs: report RUN [RUN ...]")
    if not path.parent.is_dir():
        raise ConfigError("The folder of the report does not exist", got=str(path.parent), fix="Make it first")
    tracker = Tracker(config.experiment)
    content = page_content(tracker, _scored(tracker, given), config.policy)
    text = text_of(content)
    report = VariantsReport(board=content.board, decision=content.decision, path=path)
    if "MLFLOW_RUN_ID" not in os.environ:
        atomic.write(path, text.encode())
        return report
    tags = {run_names.BASE_MODEL: content.board.baseline, run_names.EVALUATION: content.board.evaluation}
    with tracker.run(f"report {content.title}", "report", tags) as run:
        atomic.write(path, text.encode())
        run.log_file(path, "report")
        run.set_note(report.summary)
    return report


def _writer(form: str, path: Path) -> Callable[[PageContent], str]:
    """Return the function that writes the wanted form; "auto" goes by the file's suffix."""
    writers: dict[str, Callable[[PageContent], str]] = {
        "html": render_page,
        "md": page_markdown,
        "csv": lambda content: scoreboard_csv(content.board),
        "json": lambda content: json.dumps(content_values(content), indent=1, allow_nan=False) + "\n",
    }
    chosen = path.suffix.removeprefix(".").lower() if form == "auto" else form
    if chosen not in writers:
        raise ConfigError(
            "The report's format cannot be told from its file name",
            allowed=[f".{name}" for name in writers],
            got=path.name,
            fix="Give another name, or the format",
        )
    return writers[chosen]


def _scored(tracker: Tracker, given: Sequence[str]) -> Scoreboard:
    """Return the scoreboard of the given runs; a sweep's run stands for its variants, also those it has found."""
    runs: dict[str, None] = {}
    names: dict[str, str] = {}
    others: dict[str, ScoredVariant] = {}
    for run_id in given:
        check_text("runs", run_id)
        stage = tracker.look_up(run_id).tags.get(run_names.STAGE)
        if stage not in ("main", "sweep"):
            raise ConfigError(
                "This run is no main run and no sweep", allowed=_ACCEPTED, got=f"{run_id}, of stage {stage}"
            )
        if stage == "main":
            runs[run_id] = None
            continue
        for row in tracker.fetch_json(run_id, SCOREBOARD)["rows"]:
            if row["run_id"] is None:
                told = {key: row[key] for key in ("name", "method", "bits", "status", "reason")}
                others[row["name"]] = ScoredVariant(**told)
            else:
                runs[row["run_id"]], names[row["run_id"]] = None, row["name"]
    _check_alike(tracker, list(runs))
    return score_runs(tracker, list(runs), others=list(others.values()), names=names)


def _check_alike(tracker: Tracker, run_ids: Sequence[str]) -> None:
    """Refuse runs of several evaluations, and say in what these differ."""
    groups: dict[str, tuple[str, str]] = {}  # by evaluation: a run, and its baseline's run
    for run_id in run_ids:
        tags = tracker.look_up(run_id).tags
        if run_names.EVALUATION in tags:
            groups.setdefault(tags[run_names.EVALUATION], (run_id, tags[run_names.BASELINE_RUN]))
    if len(groups) < 2:
        return
    (one, left), (other, right), *_ = groups.values()
    a, b = (tracker.client.get_run(run_id).data.params for run_id in (left, right))
    differing = [f"{key} is {a.get(key)} and {b.get(key)}" for key in sorted({*a, *b}) if a.get(key) != b.get(key)]
    raise ConfigError(
        f"Runs {one[:8]} and {other[:8]} were not evaluated alike, so their numbers cannot be compared",
        allowed=_ACCEPTED,
        got="; ".join(differing) or "tasks with other items",
    )
