"""Publishes a sweep on its parent run: scoreboard, figures, warnings and counts."""

from __future__ import annotations

from collections.abc import Mapping

from mlflow_compress.decide.scoreboard import Scoreboard, ScoredVariant
from mlflow_compress.reporting.figures import draw_scoreboard, draw_similarity
from mlflow_compress.reporting.page.variants_page import render_page
from mlflow_compress.reporting.scoreboard_text import (
    finding,
    scoreboard_columns,
    scoreboard_csv,
    scoreboard_markdown,
    scoreboard_text,
    similarity_csv,
)
from mlflow_compress.results import Sweep, SweepPlan
from mlflow_compress.stages.side_by_side.page_reading import page_content
from mlflow_compress.stages.side_by_side.report_runs import SCOREBOARD
from mlflow_compress.stages.side_by_side.score_runs import score_runs
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.shared_store.live_processes import scratch_folder
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker


def publish_sweep(tracker: Tracker, run: TrackedRun, plan: SweepPlan, runs: Mapping[str, str]) -> Sweep:
    """Log everything that people read of a sweep on its run, and return it.

    Parameters
    ----------
    tracker, run : Tracker, TrackedRun
        The store and the sweep's run.
    plan : SweepPlan
        What was asked for.
    runs : mapping of str to str
        Main run of every variant, finished or failed, by its name in the sweep.
    """
    others = [
        ScoredVariant(name=name, method=name.partition(" ")[0], status="unsupported", reason=reason)
        for name, reason in plan.left_out.items()
    ]
    names = {run_id: name for name, run_id in runs.items()}
    board = score_runs(tracker, list(runs.values()), others=others, names=names)
    run.log_json(board.to_dict(), SCOREBOARD)
    run.log_text(scoreboard_markdown(board), "scoreboard.md")
    run.log_text(scoreboard_csv(board), "scoreboard.csv")
    run.log_table(scoreboard_columns(board), "scoreboard_table.json")
    run.log_json(plan.to_dict(), "plan.json")
    content = page_content(tracker, board) if board.finished else None
    alike = content.similarity if content is not None else None
    with scratch_folder(tracker.uri) as folder:
        draw_scoreboard(board, folder)
        if alike is not None:
            draw_similarity(alike, folder)
            run.log_text(similarity_csv(alike), "answer_similarity.csv")
        run.log_folder(folder, "figures")
    if content is not None:
        run.log_text(render_page(content), "report.html")
    found = finding(board)
    run.log_values(_counts(board, plan))
    run.set_tags({run_names.VERDICT: found})
    run.set_note(scoreboard_markdown(board))
    return Sweep(scoreboard=board, plan=plan, found=found, text=scoreboard_text(board), run=tracker.link(run.run_id))


def _counts(board: Scoreboard, plan: SweepPlan) -> dict[str, float]:
    """Return how many variants there are of each kind."""

    def with_status(*statuses: str) -> int:
        return sum(1 for row in board.rows if row.status in statuses)

    incomplete = sum(1 for row in board.finished if row.reason)
    return {
        "sweep/variants": len(plan.variants),
        "sweep/finished": with_status("finished") - incomplete,
        "sweep/found": len(plan.variants) - len(plan.to_do),
        "sweep/failed": with_status("failed") + incomplete,
        "sweep/unsupported": with_status("unsupported"),
        "sweep/warnings": len(board.warnings),
    }
