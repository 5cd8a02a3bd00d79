"""What the run of a speed stage says: in which runtime the variant was timed, or why it was not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlflow_compress.decide.scoreboard.scored_variant import NO_SPEED_STAGE
from mlflow_compress.tracking import run_names

_DESCRIBED = "speed_"  # before the names of the parameters that describe the runtime
_PARTS = ("runtime", "device", "dtype")
_SKIPPED = "speed: "


@dataclass(frozen=True)
class TimedIn:
    """The runtime with its version, or the reason why there is none; the other of the two is empty."""

    runtime: str = ""
    reason: str = ""


def skipped_tag(reason: str) -> dict[str, str]:
    """Return the tag of a stage's run that has timed nothing."""
    return {run_names.SKIPPED: f"{_SKIPPED}{reason}"}


def description(found: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of a stage's run that describe the runtime: its version, the device and the dtype."""
    return {f"{_DESCRIBED}{name}": found[name] for name in _PARTS}


def described_runtime(run: Any) -> dict[str, str]:
    """Return what describes the runtime of a stage's run; nothing where nothing was timed."""
    params = run.data.params
    return {name: params[f"{_DESCRIBED}{name}"] for name in _PARTS if f"{_DESCRIBED}{name}" in params}


def timed_in(run: Any | None) -> TimedIn:
    """Return what the run of a variant's speed stage says; None where a variant has no such run."""
    if run is None:
        return TimedIn(reason=NO_SPEED_STAGE)
    if run.info.status != "FINISHED":
        return TimedIn(reason=f"the speed stage failed: {run.data.tags.get(run_names.ERROR, run.info.status)}")
    if run_names.SKIPPED in run.data.tags:
        return TimedIn(reason=run.data.tags[run_names.SKIPPED].removeprefix(_SKIPPED))
    return TimedIn(runtime=described_runtime(run)["runtime"])
