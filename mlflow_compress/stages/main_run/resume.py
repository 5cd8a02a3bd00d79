"""Resuming a failed main run: its parameters, and which of its stages are finished."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mlflow_compress.config import (
    EvaluateConfig,
    JudgeConfig,
    MainConfig,
    QuantizeConfig,
    SpeedConfig,
    as_text,
    parameters,
    parse,
)
from mlflow_compress.errors import ConfigError, TrackingError
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker

_NOT_OF_A_STAGE = {"checkpoint", "experiment"}

STAGES = {
    "quantize": parameters(QuantizeConfig).keys() - _NOT_OF_A_STAGE,
    "evaluate": parameters(EvaluateConfig).keys() - _NOT_OF_A_STAGE,
    "judge": parameters(JudgeConfig).keys() - _NOT_OF_A_STAGE,
    "speed": parameters(SpeedConfig).keys() - _NOT_OF_A_STAGE,
}
"""The stages of the main job in their order, and the parameters that a user gives each."""


def finished_stages(tracker: Tracker, run_id: str) -> dict[str, str]:
    """Return the run id of every finished stage of a main run, by stage. An unknown run is a `ConfigError`."""
    try:
        children = tracker.children(run_id)
    except TrackingError as error:
        raise ConfigError("This run cannot be resumed: the store has none of this id", got=run_id) from error
    return {stage: child.info.run_id for stage in STAGES if (child := children.get(stage)) and _is_finished(child)}


def _is_finished(run: Any) -> bool:
    return bool(run.info.status == "FINISHED")


def resumed(config: MainConfig, run_id: str, tracker: Tracker, finished: Collection[str]) -> MainConfig:
    """Return the parameters of the run to resume, changed by those of `config` that differ from their defaults.

    Parameters
    ----------
    config : MainConfig
        The parameters that are given now.
    run_id : str
        The run to resume.
    tracker : Tracker
        The store.
    finished : collection of str
        The run's finished stages. Their parameters cannot change.

    Raises
    ------
    ConfigError
        The run is no main run; it is finished or still running; or a parameter of a finished stage has another value.
    """
    run = tracker.client.get_run(run_id)
    try:
        stored = tracker.fetch_json(run_id, run_names.PARAMETERS)
    except TrackingError as error:
        raise ConfigError("This run cannot be resumed: it holds no parameters", got=run_id) from error
    if run.info.status in ("FINISHED", "RUNNING"):
        raise ConfigError(
            f"Run {run_id} is {run.info.status}",
            allowed="a main run that is FAILED or KILLED",
            fix="Start the same command again without resume: finished work is reused",
        )
    defaults = as_text(MainConfig())
    given = {name: value for name, value in as_text(config).items() if value != defaults[name]}
    used = {name for stage in finished for name in STAGES[stage]}
    if changed := sorted(name for name in given.keys() & used if given[name] != stored[name]):
        raise ConfigError(
            f"Parameter '{changed[0]}' belongs to a finished stage and cannot change",
            allowed=stored[changed[0]],
            got=given[changed[0]],
            fix="Leave it out, or start a new run",
        )
    return parse(MainConfig, {**stored, **given})
