"""The rollback stage: an alias goes back to the version that had it before."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from mlflow_compress.commands.promote.parameters import HistoryConfig, RollbackConfig
from mlflow_compress.commands.promote.result import AliasHistory, Rollback, Tenure
from mlflow_compress.commands.shared.inputs import model_label
from mlflow_compress.commands.shared.past_runs import registered_model_of
from mlflow_compress.config import as_text
from mlflow_compress.config.declarations import NONE
from mlflow_compress.config.policy import PINNED
from mlflow_compress.errors import ConfigError
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.model_registry import (
    holder,
    move_alias,
    note_decision,
    previous_alias,
    waiting_versions,
)
from mlflow_compress.tracking.tracker import Tracker


def run_rollback(config: RollbackConfig) -> Rollback:
    """Move the alias back, and its "-previous" to the version that had it. A second rollback undoes the first."""
    tracker = Tracker(config.experiment)
    label = model_label(config.model)
    name = registered_model_of(tracker, config.model)
    now, before = (holder(tracker, name, alias) for alias in (config.alias, previous_alias(config.alias)))
    if now is None:
        raise ConfigError(f"No version of {name} has this alias", got=config.alias)
    if before is None:
        raise ConfigError(f"No version of {name} had this alias before, or it was deleted", got=config.alias)
    if now.pinned:
        raise ConfigError(
            f"Version {now.version} of {name} is pinned and is not replaced", fix=f"Remove its alias '{PINNED}' first"
        )
    verdict = f"{before.name} (version {before.version}) is '{config.alias}' again, in place of version {now.version}."
    tags = {
        run_names.BASE_MODEL: label,
        run_names.REGISTERED_MODEL: name,
        run_names.ALIAS: config.alias,
        run_names.MOVED_FROM: now.version,
        run_names.MOVED_TO: before.version,
        run_names.VARIANT: before.name,
        run_names.VERDICT: verdict,
    }
    with tracker.run(f"rollback {label}", "rollback", tags) as run:
        run.log_params({**as_text(config), "model": label})
        note = verdict if config.reason is None else f"{verdict}\n\nReason: {config.reason}"
        note_decision(tracker, name, before.version, run.run_id, note)
        move_alias(tracker, name, config.alias, before.version)
        run.set_note(note)
    return Rollback(
        registered_model=name,
        alias=config.alias,
        variant=before.name,
        version=before.version,
        replaced=now.version,
        reason=config.reason,
        verdict=verdict,
        run=tracker.link(run.run_id),
    )


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")


def _tenure(run: Any, until: str | None) -> Tenure:
    tags = run.data.tags
    return Tenure(
        since=_time(run.info.end_time),
        until=until,
        variant=tags["promoted"] if tags[run_names.STAGE] == "promote" else tags[run_names.VARIANT],
        version=tags[run_names.MOVED_TO],
        by=tags[run_names.STAGE],
        run_id=run.info.run_id,
        policy_sha256=tags.get(run_names.POLICY),
        verdict=tags[run_names.VERDICT],
        reason=None if run.data.params.get("reason", NONE) == NONE else run.data.params["reason"],
        approved_by=tags.get(run_names.APPROVED_BY),
        waiver=tags.get(run_names.WAIVER),
        receipt_sha256=tags.get(run_names.RECEIPT),
    )


def read_history(config: HistoryConfig) -> AliasHistory:
    """Return who had an alias when, newest first. Moves by hand leave no run; the last one of them is named."""
    tracker = Tracker(config.experiment)
    name = registered_model_of(tracker, config.model)
    wanted = {run_names.REGISTERED_MODEL: name, run_names.ALIAS: config.alias}
    runs = [run for stage in ("promote", "approve", "rollback") for run in tracker.find_finished(stage, **wanted)]
    moves = sorted((r for r in runs if run_names.MOVED_TO in r.data.tags), key=lambda run: run.info.end_time)
    ends = [_time(run.info.end_time) for run in moves[1:]]
    tenures = [_tenure(run, until) for run, until in zip(moves, [*ends, None], strict=False)]
    now = holder(tracker, name, config.alias)
    remarks = [
        f"Version {number} waits for an approval as '{alias}', "
        f"by the decision of run {version.tags[run_names.DECISION][:8]}."
        for number, (version, alias) in waiting_versions(tracker, name).items()
        if alias == config.alias
    ]
    recorded = tenures[-1].version if tenures else None
    if now is None:
        remarks.append(f"No version of {name} has the alias '{config.alias}' now.")
    elif now.version != recorded:
        remarks.append(f"Version {now.version} has '{config.alias}' now: it was moved by hand.")
    return AliasHistory(
        registered_model=name,
        alias=config.alias,
        tenures=tuple(reversed(tenures)),
        holder=None if now is None else now.version,
        remarks=tuple(remarks),
    )
