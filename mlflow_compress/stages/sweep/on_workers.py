"""The variants of a sweep as tasks of a Ray cluster: side by side, each whole on one worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mlflow_compress.config import MainConfig
from mlflow_compress.errors import WorkerError
from mlflow_compress.scoring.cluster.workers import WorkerCall, Workers
from mlflow_compress.stages.sweep.make_variant import MadeVariant
from mlflow_compress.stages.sweep.prepare import PreparedVariant
from mlflow_compress.stages.sweep.sweep_runs import close_killed
from mlflow_compress.stages.sweep.variant_worker import SweepPlace
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker

Note = Callable[[PreparedVariant, str, str], None]
"""Is told of a variant, its state (see `VariantProgress`), and what happens or was found."""


def make_on_workers(
    tracker: Tracker, parent: str, variants: Sequence[PreparedVariant], workers: Workers, note: Note
) -> list[MadeVariant]:
    """Return what became of every variant, in order.

    A variant whose worker is lost begins again on another one, where it finds what is kept on disk. With several
    workers lost it is failed, and the others go on. When this ends early, workers stop, and their runs are closed.

    Raises
    ------
    WorkerError
        A worker does not see the store or the folder of state, or no worker finds a place.
    """
    return _SideBySide(tracker, parent, variants, workers, note).make()


class _SideBySide:
    """The variants of a sweep while workers make them, by number."""

    def __init__(
        self, tracker: Tracker, parent: str, variants: Sequence[PreparedVariant], workers: Workers, note: Note
    ) -> None:
        self._tracker, self._parent, self._variants = tracker, parent, variants
        self._workers, self._note = workers, note
        self._place = SweepPlace.of(tracker, parent, judge=variants[0].asked.config.judge)
        n_shares = min(workers.n, len(variants))
        self._tasks = [_on_worker(variant, workers.device, n_shares) for variant in variants]
        self._lines = workers.said_lines()
        self._made: dict[int, MadeVariant] = {}

    def make(self) -> list[MadeVariant]:
        """Make all. What another process makes now is left for the end, and waited for."""
        try:
            for wait in (False, True):
                self._hand_out([number for number in range(len(self._tasks)) if number not in self._made], wait=wait)
        except BaseException:
            close_killed(self._tracker, self._parent)
            raise
        return [self._made[number] for number in range(len(self._tasks))]

    def _hand_out(self, left: Sequence[int], *, wait: bool) -> None:
        """Let workers make the variants of these numbers, each one at a time."""

        def task(index: int) -> WorkerCall:
            number = left[index]
            return WorkerCall("make_variant", (self._tasks[number], self._place, number, self._lines.keeper, wait))

        def done(index: int, found: MadeVariant | None) -> None:
            if found is not None:
                self._finish(left[index], found)

        def lost(index: int, error: WorkerError) -> None:
            self._finish(left[index], _lost(self._tracker, self._parent, self._variants[left[index]], error))

        self._workers.run(len(left), task, done, at_once=1, lost=lost, meanwhile=self._show)

    def _show(self) -> None:
        """Pass on what workers have said."""
        for number, line in self._lines.take():
            if number not in self._made:
                self._note(self._variants[number], "runs", line)

    def _finish(self, number: int, found: MadeVariant) -> None:
        self._show()  # what was said before
        self._made[number] = found
        self._note(self._variants[number], found.state, found.said)


def _on_worker(variant: PreparedVariant, device: str, n_shares: int) -> PreparedVariant:
    """Return the variant as a worker makes it: in its own process, on its device, with its share of judge calls."""
    config = variant.asked.config.with_values(engine="local", device=device)
    known = {**variant.known, "device": device}
    return replace(variant, asked=replace(variant.asked, config=_share(config, n_shares)), known=known)


def _share(config: MainConfig, n: int) -> MainConfig:
    """Return the parameters with a part of what all workers together may spend on judges, and ask of them."""
    asked = config.judging
    per_minute = {
        name: max(1, value // n)
        for name in ("judge_requests_per_minute", "judge_tokens_per_minute")
        if (value := getattr(asked, name))
    }
    return config.with_values(
        judge_max_cost=asked.judge_max_cost / n, judge_concurrency=max(1, asked.judge_concurrency // n), **per_minute
    )


def _lost(tracker: Tracker, parent: str, variant: PreparedVariant, error: WorkerError) -> MadeVariant:
    """Return the failed main run of a variant whose workers were lost, one after the other.

    Raises
    ------
    WorkerError
        None of them had come so far that there is a run.
    """
    close_killed(tracker, parent)
    unfinished = tracker.find_unfinished("main", **{run_names.VARIANT_KEY: variant.key, run_names.PARENT: parent})
    if not unfinished:
        raise error
    tracker.add_to(unfinished[0]).end("FAILED", str(error))
    return MadeVariant(run_id=unfinished[0], state="failed", said=str(error))
