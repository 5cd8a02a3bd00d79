"""What a sweep will cost: time from earlier runs, disk from the size of the baseline and the bits."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from mlflow_compress.compression.method import MethodConfig
from mlflow_compress.config import SweepConfig
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.models.stored_weights import read_headers, total_bytes
from mlflow_compress.results import PlannedVariant, SweepPlan
from mlflow_compress.stages.model_names import model_label
from mlflow_compress.stages.side_by_side.score_runs import stage_seconds
from mlflow_compress.stages.sweep.combinations import LeftOut
from mlflow_compress.stages.sweep.prepare import Prepared, PreparedVariant
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker

_RUNS = 5  # number of newest finished runs behind an estimate
_SCALE_BITS = 16  # stored bits of one group's scale; a zero point takes as many as a weight
_LOGGED_UP_TO = 2 * 2**30  # with log_weights=auto


def plan_of(config: SweepConfig, prepared: Prepared, left_out: list[LeftOut], tracker: Tracker) -> SweepPlan:
    """Return the plan: every variant, whether it is finished, and what the others cost."""
    base_bytes = total_bytes(read_headers(prepared.source.folder))
    logged = config.log_weights == "true" or (config.log_weights == "auto" and base_bytes <= _LOGGED_UP_TO)
    evaluated = _earlier(config, prepared, tracker)
    variants = []
    for variant in prepared.variants:
        finished = variant.finished_run(tracker)
        variants.append(
            PlannedVariant(
                name=variant.name,
                method=variant.method,
                finished_run=finished,
                seconds=None if finished else _seconds(config, variant, evaluated, tracker),
                size_bytes=_size(prepared.source, base_bytes, variant.asked.settings),
            )
        )
    return SweepPlan(
        baseline=model_label(config.source.model),
        evaluation=prepared.evaluation,
        variants=tuple(variants),
        left_out={one.name: one.reason for one in left_out},
        base_size_bytes=base_bytes,
        copies=2 if logged else 1,
    )


def _size(source: SourceModel, base_bytes: int, settings: MethodConfig | None) -> float | None:
    """Return the estimated bytes of a variant on this disk: none of a served model."""
    return 0.0 if settings is None else size_estimate(source, base_bytes, settings)


def size_estimate(source: SourceModel, base_bytes: int, settings: MethodConfig) -> float | None:
    """Return the estimated bytes of a checkpoint; None for a method that has no bits.

    Linear layers take ``bits`` per weight, and per group a scale of 16 bits and a zero point; everything else is as
    large as in the baseline.
    """
    given = settings.settings()
    bits, group = given.get("bits"), given.get("group_size")
    if not isinstance(bits, int):
        return None
    weights = sum(rows * columns for rows, columns in source.matrices.values())
    stored = base_bytes * weights / source.parameters
    per_weight = bits + (_SCALE_BITS + bits) / group if isinstance(group, int) else bits
    return base_bytes - stored + weights * per_weight / 8


def _earlier(config: SweepConfig, prepared: Prepared, tracker: Tracker) -> dict[str, float]:
    """Return the median seconds of evaluate and judge over the newest finished runs of this evaluation."""
    runs = tracker.find_finished("main", **{run_names.EVALUATION: prepared.evaluation})[:_RUNS]
    return _medians(tracker, [run.info.run_id for run in runs])


def _medians(tracker: Tracker, run_ids: list[str]) -> dict[str, float]:
    each = [stage_seconds(tracker, tracker.children(run_id)) for run_id in run_ids]
    stages = {stage for found in each for stage in found}
    return {stage: statistics.median(found[stage] for found in each if stage in found) for stage in stages}


def _seconds(
    config: SweepConfig, variant: PreparedVariant, evaluated: Mapping[str, float], tracker: Tracker
) -> float | None:
    """Return the estimated duration of a variant: its method's compression, and evaluation and judge as before."""
    tags = {run_names.BASE_MODEL: model_label(config.source.model), run_names.METHOD: variant.method}
    same_method = tracker.find_finished("main", **tags)[:_RUNS]
    served = variant.asked.settings is None
    compressed = 0.0 if served else _medians(tracker, [run.info.run_id for run in same_method]).get("quantize")
    needed = [compressed, evaluated.get("evaluate"), *([evaluated.get("judge")] if config.judge else [])]
    return None if any(seconds is None for seconds in needed) else sum(seconds or 0.0 for seconds in needed)
