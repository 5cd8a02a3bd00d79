"""The rollback stage: an alias goes back to the version that had it before."""

from __future__ import annotations

from mlflow_compress.config import RollbackConfig, as_text
from mlflow_compress.errors import ConfigError
from mlflow_compress.results import Rollback
from mlflow_compress.stages.model_names import model_label
from mlflow_compress.stages.promotion.registered import registered_model_of
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.logged_models.aliases import (
    PINNED,
    check_alias,
    holder,
    move_alias,
    note_decision,
    previous_alias,
)
from mlflow_compress.tracking.tracker import Tracker


def run_rollback(config: RollbackConfig) -> Rollback:
    """Move the alias back, and its "-previous" to the version that had it. A second rollback undoes the first.

    Raises
    ------
    ConfigError
        Nobody has the alias, nobody had it before, or the version that has it is pinned. No run is made.
    """
    check_alias(config.alias)
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
        note_decision(tracker, name, before.version, run.run_id)
        move_alias(tracker, name, config.alias, before.version)
        run.set_note(verdict if config.reason is None else f"{verdict}\n\nReason: {config.reason}")
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
