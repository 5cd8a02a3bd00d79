"""One variant of a sweep, made in this process: compressed, evaluated, judged and logged as a main run."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from mlflow_compress.config import Command, EvaluateConfig, JudgeConfig, QuantizeConfig
from mlflow_compress.errors import MlflowCompressError, StageError
from mlflow_compress.stages.evaluate import run_evaluate
from mlflow_compress.stages.judge import run_judge
from mlflow_compress.stages.main import run_variant
from mlflow_compress.stages.quantize import run_quantize
from mlflow_compress.stages.sweep.prepare import PreparedVariant
from mlflow_compress.stages.sweep.sweep_runs import one_process
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.projects import run_stage_here
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MadeVariant:
    """What became of a variant.

    Attributes
    ----------
    run_id : str
        Its main run, finished or failed.
    state : {"finished", "found", "failed"}
        "found" means that an earlier run holds it.
    said : str
        What was found, or why it failed.
    """

    run_id: str
    state: Literal["finished", "found", "failed"]
    said: str


def make_variant(
    tracker: Tracker, variant: PreparedVariant, parent: str, say: Callable[[str], None], *, wait: bool
) -> MadeVariant | None:
    """Make a variant below the run `parent`, or find it. Return None where another process makes it now.

    Parameters
    ----------
    tracker : Tracker
        The store.
    variant : PreparedVariant
    parent : str
        The sweep's run.
    say : callable (line)
        Is told how far it is.
    wait : bool
        Wait for the other process instead.

    Raises
    ------
    MlflowCompressError
        Its run could not be opened, which is no fault of this variant.
    """
    try:
        with one_process(tracker, variant.key, wait=wait) as alone:
            return _make(tracker, variant, parent, say) if alone else None
    finally:
        _free_memory()  # once more: while an error was handled, its frames held the model


def _make(tracker: Tracker, variant: PreparedVariant, parent: str, say: Callable[[str], None]) -> MadeVariant:
    earlier = variant.finished_run(tracker)
    if earlier is not None:
        return MadeVariant(run_id=earlier, state="found", said=f"run {earlier}")
    say("starts")
    try:
        made = run_variant(
            variant.asked.config,
            tracker,
            variant.known,
            say=say,
            start=partial(_in_process, say=say),
            more_tags={run_names.PARENT: parent, run_names.VARIANT_KEY: variant.key},
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


def _in_process(
    tracker: Tracker, stage: str, config: Command, parent: TrackedRun, *, say: Callable[[str], None]
) -> str:
    """Run a stage in this process: its libraries are imported, and what variants share is in memory already."""

    def work() -> object:
        if isinstance(config, QuantizeConfig):
            return run_quantize(config, tracker)
        if isinstance(config, EvaluateConfig):
            return run_evaluate(config, tracker)
        assert isinstance(config, JudgeConfig)
        return run_judge(config, tracker, say)

    try:
        return run_stage_here(tracker, stage, work, parent=parent)
    finally:
        _free_memory()


def _free_memory() -> None:
    """Free the models of what has ended; on a GPU too, where the next reload check needs room."""
    import torch

    gc.collect()  # modules have reference cycles
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
