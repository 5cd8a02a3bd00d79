"""The variants of a sweep as tasks of a Ray cluster: side by side, each whole on one worker."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from mlflow_compress.commands.sweep.make_variant import MadeVariant, close_killed, make_variant
from mlflow_compress.commands.sweep.plan import PreparedVariant
from mlflow_compress.commands.sweep.result import State
from mlflow_compress.compression.pipeline import reload_helper
from mlflow_compress.engines.ray.cluster_worker import ClusterWorker
from mlflow_compress.engines.ray.workers import WorkerCall, Workers
from mlflow_compress.errors import ConfigError, WorkerError
from mlflow_compress.home import VARIABLE as HOME
from mlflow_compress.home import home
from mlflow_compress.judges.session import KEY_VARIABLE
from mlflow_compress.kept import keeping
from mlflow_compress.models.placement import BALANCED
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.live_processes import is_alive, own_name
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.transport.endpoint import VARIABLES, shown_url

_FOR_THIS_PROCESS = ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME")  # of a command that `mlflow run` has started
_QUIET = {
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
}


@dataclass(frozen=True, kw_only=True)
class SweepPlace:
    """Where a sweep keeps its runs, and by what a worker knows that it is at the same place."""

    parent: str  # The sweep's run, and its experiment
    experiment_id: str
    uri: str  # The store, and the folder of state (see `home`)
    home: str
    process: str  # The name of the sweep's process in that folder
    # How judge models are reached, without secrets: see `_judge_access`. None where no answers are judged.
    judge: Mapping[str, str] | None

    @classmethod
    def of(cls, tracker: Tracker, parent: str, *, judge: bool) -> "SweepPlace":
        return cls(
            parent=parent,
            experiment_id=tracker.experiment_id,
            uri=tracker.uri,
            home=str(home(tracker.uri)),
            process=own_name(tracker.uri),
            judge=_judge_access() if judge else None,
        )


def _judge_access() -> dict[str, str]:
    """Return how this process reaches judge models: whether it has a key, and addresses without passwords."""
    addresses = {variable: shown_url(os.environ.get(variable, "").strip()) for variable in VARIABLES.values()}
    return {KEY_VARIABLE: "set" if os.environ.get(KEY_VARIABLE, "").strip() else "not set", **addresses}


class VariantWorker(ClusterWorker):
    """Scores shards of the baseline, and afterwards makes whole variants, which share what this process has read."""

    def __init__(self, device: str, n_threads: int) -> None:
        super().__init__(device, n_threads)
        self._while_alive = ExitStack()
        self._begun = False

    def make_variant(
        self, variant: PreparedVariant, place: SweepPlace, number: int, keeper: Any, wait: bool
    ) -> MadeVariant | None:
        self.release()
        if not self._begun:
            os.environ.update({**_QUIET, "MLFLOW_TRACKING_URI": place.uri, HOME: place.home})
            for name in _FOR_THIS_PROCESS:
                os.environ.pop(name, None)
            _check(place)
            self._while_alive.enter_context(keeping())
            self._while_alive.enter_context(reload_helper())
            self._begun = True
        tracker = Tracker(variant.asked.config.experiment)
        tracker.experiment_id = place.experiment_id

        def say(line: str) -> None:
            keeper.say.remote(number, line)

        return make_variant(tracker, variant, place.parent, say, wait=wait)


def _check(place: SweepPlace) -> None:
    if not is_alive(place.uri, place.process):
        raise ConfigError(
            "The folder for unfinished work and locks is not the same on the machine of a worker",
            got=place.home,
            fix=f"Set {HOME} to a folder on a disk that all machines share",
        )
    here = _judge_access()
    if place.judge is not None and (differ := [name for name, value in place.judge.items() if here[name] != value]):
        raise ConfigError(
            f"The environment variable {differ[0]} is not the same on the machine of a worker",
            allowed=place.judge[differ[0]] or "not set",
            got=here[differ[0]] or "not set",
            fix="Start Ray on every machine with the variables for the judge",
        )


Note = Callable[[PreparedVariant, State, str], None]
"""Is told of a variant, its state (see `VariantProgress`), and what happens or was found."""


def make_on_workers(
    tracker: Tracker, parent: str, variants: Sequence[PreparedVariant], workers: Workers, note: Note
) -> list[MadeVariant]:
    """Return what became of every variant, in order.

    A variant whose worker is lost begins again on another one, where it finds what is kept on disk. With several
    workers lost it is failed, and the others go on. When this ends early, workers stop, and their runs are closed.
    """
    place = SweepPlace.of(tracker, parent, judge=variants[0].asked.config.judge)
    n_shares = min(workers.n, len(variants))
    tasks = [_on_worker(variant, workers.device, n_shares) for variant in variants]
    lines = workers.said_lines()
    made: dict[int, MadeVariant] = {}

    def show() -> None:
        """Pass on what workers have said."""
        for number, line in lines.take():
            if number not in made:
                note(variants[number], "runs", line)

    def finish(number: int, one: MadeVariant) -> None:
        show()  # what was said before
        made[number] = one
        note(variants[number], one.state, one.said)

    def hand_out(left: Sequence[int], *, wait: bool) -> None:
        """Let workers make the variants of these numbers, each one at a time."""

        def task(index: int) -> WorkerCall:
            return WorkerCall("make_variant", (tasks[left[index]], place, left[index], lines.keeper, wait))

        def done(index: int, one: MadeVariant | None) -> None:
            if one is not None:
                finish(left[index], one)

        def lost(index: int, error: WorkerError) -> None:
            finish(left[index], _lost(tracker, parent, variants[left[index]], error))

        workers.run(len(left), task, done, at_once=1, lost=lost, meanwhile=show)

    try:
        for wait in (False, True):  # what another process makes now is left for the end, and waited for
            hand_out([number for number in range(len(tasks)) if number not in made], wait=wait)
    except BaseException:
        close_killed(tracker, parent)
        raise
    return [made[number] for number in range(len(tasks))]


def _on_worker(variant: PreparedVariant, device: str, n_shares: int) -> PreparedVariant:
    """Return the variant as a worker makes it: in its own process, on its device, with its share of judge calls."""
    judging = variant.asked.config.judging
    if variant.asked.config.source.device == BALANCED:
        device = BALANCED
    per_minute = {
        name: max(1, value // n_shares)
        for name in ("judge_requests_per_minute", "judge_tokens_per_minute")
        if (value := getattr(judging, name))
    }
    config = variant.asked.config.with_values(
        engine="local",
        device=device,
        judge_max_cost=judging.judge_max_cost / n_shares,
        judge_concurrency=max(1, judging.judge_concurrency // n_shares),
        **per_minute,
    )
    return replace(variant, asked=replace(variant.asked, config=config), known={**variant.known, "device": device})


def _lost(tracker: Tracker, parent: str, variant: PreparedVariant, error: WorkerError) -> MadeVariant:
    """Return the failed main run of a variant whose workers were lost, one after the other."""
    close_killed(tracker, parent)
    unfinished = tracker.find_unfinished("main", **{run_names.VARIANT_KEY: variant.key, run_names.SWEEP_RUN: parent})
    if not unfinished:
        raise error
    tracker.add_to(unfinished[0]).end("FAILED", str(error))
    return MadeVariant(run_id=unfinished[0], state="failed", said=str(error))
