"""What the run of a speed stage says: in which runtime the variant was timed, or why it was not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlflow_compress.decide.scoreboard.scored_variant import NO_SPEED_STAGE
from mlflow_compress.tracking import run_names

RUNTIME = "speed_runtime"
"""Parameter of the stage's run."""

_SKIPPED = "speed: "


@dataclass(frozen=True)
class TimedIn:
    """The runtime with its version, or the reason why there is none; the other of the two is empty."""

    runtime: str = ""
    reason: str = ""


def skipped_tag(reason: str) -> dict[str, str]:
    """Return the tag of a stage's run that has timed nothing."""
    return {run_names.SKIPPED: f"{_SKIPPED}{reason}"}


def timed_in(run: Any | None) -> TimedIn:
    """Return what the run of a variant's speed stage says; None where a variant has no such run."""
    if run is None:
        return TimedIn(reason=NO_SPEED_STAGE)
    if run.info.status != "FINISHED":
        return TimedIn(reason=f"the speed stage failed: {run.data.tags.get(run_names.ERROR, run.info.status)}")
    if run_names.SKIPPED in run.data.tags:
        return TimedIn(reason=run.data.tags[run_names.SKIPPED].removeprefix(_SKIPPED))
    return TimedIn(runtime=run.data.params[RUNTIME])
