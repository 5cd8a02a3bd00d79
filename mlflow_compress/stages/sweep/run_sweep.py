"""Runs a sweep: every variant in this process, one after the other, and a scoreboard of all."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from mlflow_compress.compression.reload_helper import reload_helper
from mlflow_compress.config import (
    Command,
    EvaluateConfig,
    JudgeConfig,
    QuantizeConfig,
    SpeedConfig,
    SweepConfig,
    as_text,
)
from mlflow_compress.errors import MlflowCompressError, StageError, SweepError
from mlflow_compress.home import out_folder
from mlflow_compress.kept import keeping
from mlflow_compress.results import Sweep, SweepPlan, SweepProgress, VariantProgress
from mlflow_compress.stages.evaluate import evaluate_baseline, run_evaluate
from mlflow_compress.stages.evaluation.open_models import engine_started
from mlflow_compress.stages.get_or_create import digest
from mlflow_compress.stages.judge import run_judge
from mlflow_compress.stages.main import run_variant
from mlflow_compress.stages.quantize import run_quantize
from mlflow_compress.stages.resuming.unfinished import unfinished_until_ended
from mlflow_compress.stages.speed.run_speed import run_speed
from mlflow_compress.stages.sweep.combinations import combinations
from mlflow_compress.stages.sweep.plan_text import plan_text
from mlflow_compress.stages.sweep.prepare import Prepared, PreparedVariant, prepare
from mlflow_compress.stages.sweep.publish_sweep import publish_sweep
from mlflow_compress.stages.sweep.sweep_estimates import plan_of
from mlflow_compress.stages.sweep.sweep_runs import one_process, parent_run
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.projects import run_stage_here
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker

logger = logging.getLogger(__name__)

Tell = Callable[[SweepProgress], None]


def _silent(progress: SweepProgress) -> None:
    """Tell nobody."""


def in_process(tracker: Tracker, stage: str, config: Command, parent: TrackedRun, *, say: Callable[[str], None]) -> str:
    """Run a stage in this process: its libraries are imported, and what variants share is in memory already."""

    def work() -> object:
        if isinstance(config, QuantizeConfig):
            return run_quantize(config, tracker)
        if isinstance(config, EvaluateConfig):
            return run_evaluate(config, tracker)
        if isinstance(config, JudgeConfig):
            return run_judge(config, tracker, say)
        assert isinstance(config, SpeedConfig)
        return run_speed(config, tracker)

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


def run_sweep(config: SweepConfig, tell: Tell = _silent) -> Sweep | SweepPlan:
    """Compress, evaluate and judge every variant, and return the scoreboard; for a dry run, return the plan only.

    What an earlier run holds is found, not computed again. A variant that fails is marked, and the others go on.

    Parameters
    ----------
    config : SweepConfig
        The parameters, with absolute paths.
    tell : callable (progress)
        Is told what happens.

    Raises
    ------
    ConfigError, DataError
        A parameter is wrong. No run was made.
    SweepError
        Variants failed. The others are published.
    """
    chosen, left_out = combinations(config)
    tracker = Tracker(config.experiment)
    folder = str(out_folder(config.variants.output_dir, tracker.uri))
    chosen = [replace(one, config=one.config.with_values(output_dir=folder)) for one in chosen]
    noted = nullcontext() if config.dry_run else unfinished_until_ended(config)
    with noted, keeping(), engine_started(config.running, config.source):
        prepared = prepare(config, chosen, tracker)
        plan = plan_of(config, prepared, left_out, tracker)
        if config.dry_run:
            return plan
        tell(SweepProgress(line=plan_text(plan)))
        name = f"sweep of {len(prepared.variants)} variants {plan.baseline}"
        key = digest({"variants": sorted(variant.key for variant in prepared.variants), "left_out": plan.left_out})
        tags = {run_names.BASE_MODEL: plan.baseline, run_names.EVALUATION: prepared.evaluation}
        with parent_run(tracker, name, key, tags) as run, reload_helper():
            run.log_params(as_text(config))
            runs = _Variants(tracker, run, prepared, tell).make()
            sweep = publish_sweep(tracker, run, plan, runs)
            if sweep.failed:
                reasons = "; ".join(f"{name}: {reason}" for name, reason in sweep.failed.items())
                raise SweepError(
                    f"{len(sweep.failed)} of {len(prepared.variants)} variants failed: {reasons}",
                    published=sweep,
                    fix="The others are published. The same command again does what is missing",
                )
    return sweep


class _Variants:
    """The variants of a sweep, made one after the other under the sweep's run."""

    def __init__(self, tracker: Tracker, run: TrackedRun, prepared: Prepared, tell: Tell) -> None:
        self._tracker, self._run, self._prepared, self._tell = tracker, run, prepared, tell
        self._progress = {v.key: VariantProgress(name=v.name) for v in prepared.variants}
        self._runs: dict[str, str] = {}

    def make(self) -> dict[str, str]:
        """Return the main run of every variant, finished or failed, by its name.

        A variant that another process makes at this moment is left for the end, and waited for.
        """
        evaluate_baseline(self._prepared.variants[0].asked.config.evaluate_config(), self._tracker)
        postponed = [variant for variant in self._prepared.variants if not self._one(variant, wait=False)]
        for variant in postponed:
            self._one(variant, wait=True)
        return {variant.name: self._runs[variant.name] for variant in self._prepared.variants}

    def _one(self, variant: PreparedVariant, *, wait: bool) -> bool:
        """Make one variant, or find it; return False where another process makes it now."""
        with one_process(self._tracker, variant.key, wait=wait) as alone:
            if not alone:
                return False
            earlier = variant.finished_run(self._tracker)
            if earlier is not None:
                self._runs[variant.name] = earlier
                self._note(variant, "found", f"run {earlier}")
                return True
            self._note(variant, "runs", "starts")

            def say(line: str) -> None:
                self._note(variant, "runs", line)

            try:
                made = run_variant(
                    variant.asked.config,
                    self._tracker,
                    variant.known,
                    say=say,
                    start=partial(in_process, say=say),
                    more_tags={run_names.PARENT: self._run.run_id, run_names.VARIANT_KEY: variant.key},
                )
            except Exception as error:
                unfinished = self._tracker.find_unfinished("main", **{run_names.VARIANT_KEY: variant.key})
                if not unfinished:  # not a fault of this variant: its run could not be opened
                    raise
                if not isinstance(error, MlflowCompressError):
                    logger.exception("%s failed", variant.name)
                self._runs[variant.name] = unfinished[0]
                self._note(variant, "failed", error.what if isinstance(error, StageError) else str(error))
            else:
                assert made.run is not None
                self._runs[variant.name] = made.run.run_id
                self._note(variant, "finished", made.verdict.removeprefix(f"{made.name}: "))
        _free_memory()  # once more: while an error is handled, its frames hold the model
        return True

    def _note(self, variant: PreparedVariant, state: str, doing: str) -> None:
        self._progress[variant.key] = VariantProgress(name=variant.name, state=state, doing=doing)  # type: ignore[arg-type]
        every = tuple(self._progress.values())
        number = list(self._progress).index(variant.key) + 1
        self._tell(SweepProgress(line=f"[{number}/{len(every)}] {variant.name}: {doing}", variants=every))
