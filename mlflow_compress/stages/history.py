"""The history of an alias: who had it when, by which decision and policy. Read from the runs that moved it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from mlflow_compress.config import HistoryConfig
from mlflow_compress.results import AliasHistory, Tenure
from mlflow_compress.stages.promotion.registered import registered_model_of
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.logged_models.aliases import check_alias, holder
from mlflow_compress.tracking.tracker import Tracker


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")


def _tenure(run: Any, until: str | None) -> Tenure:
    tags = run.data.tags
    by_rollback = tags[run_names.STAGE] == "rollback"
    return Tenure(
        since=_time(run.info.end_time),
        until=until,
        variant=tags[run_names.VARIANT] if by_rollback else tags["promoted"],
        version=tags[run_names.MOVED_TO],
        by="rollback" if by_rollback else "promote",
        run_id=run.info.run_id,
        policy_sha256=tags.get(run_names.POLICY),
        verdict=tags[run_names.VERDICT],
    )


def read_history(config: HistoryConfig) -> AliasHistory:
    """Return who had an alias when, newest first. Moves by hand leave no run; the last one of them is named.

    Raises
    ------
    ConfigError
        Nothing of this baseline is registered, or several models have this name.
    """
    check_alias(config.alias)
    tracker = Tracker(config.experiment)
    name = registered_model_of(tracker, config.model)
    wanted = {run_names.REGISTERED_MODEL: name, run_names.ALIAS: config.alias}
    runs = [run for stage in ("promote", "rollback") for run in tracker.find_finished(stage, **wanted)]
    moves = sorted((r for r in runs if run_names.MOVED_TO in r.data.tags), key=lambda run: run.info.end_time)
    ends = [_time(run.info.end_time) for run in moves[1:]]
    tenures = [_tenure(run, until) for run, until in zip(moves, [*ends, None], strict=False)]
    now = holder(tracker, name, config.alias)
    remarks = []
    recorded = tenures[-1].version if tenures else None
    if now is None:
        remarks.append(f"No version of {name} has the alias '{config.alias}' now.")
    elif now.version != recorded:
        remarks.append(
            f"Version {now.version} has '{config.alias}' now: it was moved by hand, or by an earlier release."
        )
    return AliasHistory(
        registered_model=name,
        alias=config.alias,
        tenures=tuple(reversed(tenures)),
        holder=None if now is None else now.version,
        remarks=tuple(remarks),
    )
