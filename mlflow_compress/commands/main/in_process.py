"""Runs stages in this process, one after the other: what they have in common is loaded and read once."""

import gc
from collections.abc import Callable

from mlflow_compress.commands.evaluate.run import run_evaluate
from mlflow_compress.commands.judge.run import run_judge
from mlflow_compress.commands.quantize.run import run_quantize
from mlflow_compress.commands.speed.run import run_speed
from mlflow_compress.config import Parameters
from mlflow_compress.tracking.projects import run_stage_here
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker

_RUNS: dict[str, Callable[..., object]] = {
    "quantize": run_quantize,
    "evaluate": run_evaluate,
    "judge": run_judge,
    "speed": run_speed,
}


def in_process(
    tracker: Tracker, stage: str, config: Parameters, parent: TrackedRun, *, say: Callable[[str], None]
) -> str:
    """Run a stage in this process: its libraries are imported, and what variants share is in memory already."""
    told = {"say": say} if stage == "judge" else {}
    try:
        return run_stage_here(tracker, stage, lambda: _RUNS[stage](config, tracker, **told), parent=parent)
    finally:
        free_memory()


def free_memory() -> None:
    """Free the models of what has ended; on a GPU too, where the next reload check needs room."""
    import torch

    gc.collect()  # modules have reference cycles
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
