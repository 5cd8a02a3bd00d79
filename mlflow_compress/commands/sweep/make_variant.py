"""One variant of a sweep, made in this process: compressed, evaluated, judged and logged as a main run."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from mlflow_compress.commands.main.in_process import free_memory, in_process
from mlflow_compress.commands.main.run import finished_stages, run_variant
from mlflow_compress.commands.shared.get_or_create import workdirs_folder
from mlflow_compress.commands.sweep.plan import PreparedVariant
from mlflow_compress.errors import MlflowCompressError, StageError
from mlflow_compress.files import alone_with
from mlflow_compress.lifetime import quick_collections
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.live_processes import is_alive
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker, close_dead_runs

_DYING_SECONDS = 20.0  # until the system has ended a process that was killed


def one_process(tracker: Tracker, key: str, *, wait: bool) -> AbstractContextManager[bool]:
    """Yield whether this process alone has the key; without `wait`, False where another process has it."""
    folder: Path = workdirs_folder(tracker.uri)
    folder.mkdir(parents=True, exist_ok=True)
    return alone_with(folder / f"sweep-{key[:16]}.lock", wait=wait)


@contextmanager
def parent_run(
    tracker: Tracker, name: str, key: str, tags: Mapping[str, str], *, stage: str = "sweep"
) -> Iterator[TrackedRun]:
    """Open the run of a sweep or a search: the unfinished one of this key that nobody has open, or a new one."""
    with one_process(tracker, key, wait=False) as alone:
        unfinished = tracker.find_unfinished(stage, **{run_names.SWEEP_KEY: key}) if alone else []
        if unfinished:
            tracker.hand_over(unfinished[0])
            tracker.end_children(unfinished[0])
            opened = tracker.reopen(unfinished[0])
        else:
            opened = tracker.run(name, stage, {run_names.SWEEP_KEY: key, **tags})
        with opened as run:
            yield run


def close_killed(tracker: Tracker, parent: str) -> None:
    """Close the runs that workers of a sweep have left open when they were killed: they become KILLED."""
    open_mains = [
        run.data.tags[run_names.PROCESS]
        for run_id in tracker.find_unfinished("main", **{run_names.SWEEP_RUN: parent})
        if (run := tracker.client.get_run(run_id)).info.status == "RUNNING"
    ]
    until = time.monotonic() + _DYING_SECONDS
    while any(is_alive(tracker.uri, process) for process in open_mains) and time.monotonic() < until:
        time.sleep(0.1)
    close_dead_runs(tracker.client, tracker.uri)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MadeVariant:
    """What became of a variant."""

    run_id: str  # Its main run, finished or failed
    state: Literal["finished", "found", "failed"]  # "found" means that an earlier run holds it
    said: str  # What was found, or why it failed


def make_variant(
    tracker: Tracker, variant: PreparedVariant, parent: str, say: Callable[[str], None], *, wait: bool
) -> MadeVariant | None:
    """Make a variant below the run `parent`, or find it. Return None where another process makes it now."""
    try:
        with one_process(tracker, variant.key, wait=wait) as alone, quick_collections():
            return _make(tracker, variant, parent, say) if alone else None
    finally:
        free_memory()  # once more: while an error was handled, its frames held the model


def _make(tracker: Tracker, variant: PreparedVariant, parent: str, say: Callable[[str], None]) -> MadeVariant:
    earlier = variant.finished_run(tracker)
    config, finished = variant.asked.config, dict[str, str]()
    if earlier is not None:
        finished = finished_stages(tracker, earlier)
        evaluated = tracker.run_of(finished["evaluate"]).data.params
        if config.sampling.before_last is None or evaluated["items"] == config.sampling.logged["items"]:
            return MadeVariant(run_id=earlier, state="found", said=f"run {earlier}")
        del finished["evaluate"]  # it goes on with more items; the rest stays
        config = config.with_values(resume=earlier)
    say("starts")
    again = {} if variant.replicate_of is None else {run_names.REPLICATE_OF: variant.replicate_of}
    try:
        made = run_variant(
            config,
            tracker,
            variant.known,
            say=say,
            finished=finished,
            start=partial(in_process, say=say),
            more_tags={run_names.SWEEP_RUN: parent, run_names.VARIANT_KEY: variant.key, **again},
        )
    except Exception as error:
        unfinished = tracker.find_unfinished("main", **{run_names.VARIANT_KEY: variant.key})
        if not unfinished:  # its run could not be opened
            raise
        if not isinstance(error, MlflowCompressError):
            logger.exception("%s failed", variant.name)
        said = error.what if isinstance(error, StageError) else str(error)
        return MadeVariant(run_id=unfinished[0], state="failed", said=said)
    assert made.run is not None
    return MadeVariant(run_id=made.run.run_id, state="finished", said=made.verdict.removeprefix(f"{made.name}: "))
