"""Progress lines: which stage begins, and how long it took in earlier runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker

_RUNS = 5  # number of newest finished runs behind an estimate

WHAT = {
    "quantize": "compresses the model and loads it again to check it",
    "evaluate": "scores both models on the same items",
    "judge": "lets both models answer the instructions",
    "speed": "times both models in turn in the runtime that the variant is meant for",
}


class Progress:
    """Shows which stage begins, with an estimate of its duration."""

    def __init__(self, tracker: Tracker, label: str, say: Callable[[str], None]) -> None:
        self._tracker, self._label, self.say = tracker, label, say

    def begin(self, stage: str, number: int, total: int) -> None:
        """Print that a stage begins."""
        self.say(f"[{number}/{total}] {stage}: {WHAT[stage]} ({self._estimate(stage)})")

    def skip(self, stage: str, number: int, total: int) -> None:
        """Print that a stage has finished in an earlier run."""
        self.say(f"[{number}/{total}] {stage}: finished before")

    def _estimate(self, stage: str) -> str:
        runs = self._tracker.find_finished(stage, **{run_names.BASE_MODEL: self._label})[:_RUNS]
        seconds = [(run.info.end_time - run.info.start_time) / 1000 for run in runs]
        seconds = [one for one in seconds if one >= 0]  # the clock was set back during the others
        if not seconds:
            return f"first time for {self._label}: no estimate"
        return f"about {duration(statistics.median(seconds))}, as in the last {_times(len(seconds))}"


def _times(count: int) -> str:
    return "run" if count == 1 else f"{count} runs"


def duration(seconds: float) -> str:
    """Return a duration in a readable unit: "less than 1 s", "40 s", "12 min", "3.5 h"."""
    if 0 < seconds < 1:
        return "less than 1 s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
