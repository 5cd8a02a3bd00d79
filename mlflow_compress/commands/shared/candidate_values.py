"""Variants as candidates: with the numbers that a policy reads of their evaluations, and the stages that finished."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mlflow_compress.commands.evaluate.stored import results_from_json
from mlflow_compress.commands.shared.model_names import SERVED_METHOD, compresses
from mlflow_compress.commands.shared.speed_runs import timed_in
from mlflow_compress.decide.gates import without_speed
from mlflow_compress.decide.policy_gates import GateReading, PolicyGates, read_gates
from mlflow_compress.decide.promotion import Candidate
from mlflow_compress.records import MetricResult, RunRecords
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.evaluations import Variant
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.tracker import Tracker

_MEASURING = ("evaluate", "judge", "speed")  # stages whose runs hold results


def candidates_of(
    tracker: Tracker, variants: Iterable[Variant], label: str, versions: Mapping[str, str], policy: PolicyGates
) -> list[Candidate]:
    """Return variants as candidates of a policy.

    Main runs show what the standard gates read. What else a policy reads is in the results of the stages' runs. Those
    are found with one search per stage, whatever the number of variants, and only where the policy needs them.
    """
    asks = bool(policy.readings or policy.rules)
    children = finished_children(tracker, label) if asks else {}
    found = []
    for variant in variants:
        run = variant.run
        method = run.data.tags[run_names.METHOD]
        below = children.get(run.info.run_id, {})
        found.append(
            Candidate(
                name=variant.name,
                run_id=run.info.run_id,
                version=versions.get(run.info.run_id),
                method=method,
                metrics={**run.data.metrics, **_read(tracker, below.values(), policy.readings)},
                items=variant.items,
                compresses=compresses(method),
                served=method == SERVED_METHOD,
                stages=frozenset(below) if asks else None,
                absent=absent_values(below.get("speed")) if policy.asks_speed else {},
            )
        )
    return found


def absent_values(speed: Any | None) -> dict[str, str]:
    """Return why a variant has no speed and no memory, as candidates take it; nothing where it has both."""
    return without_speed(timed_in(speed).reason)


def finished_children(tracker: Tracker, label: str) -> dict[str, dict[str, Any]]:
    """Return the newest finished run of every measuring stage of a baseline's main runs, by main run and stage."""
    found: dict[str, dict[str, Any]] = {}
    for stage in _MEASURING:
        for run in tracker.find_finished(stage, **{run_names.BASE_MODEL: label}):
            parent = run.data.tags.get(run_names.PARENT)
            if parent is not None:
                found.setdefault(parent, {}).setdefault(stage, run)
    return found


def _read(tracker: Tracker, runs: Iterable[Any], readings: Collection[GateReading]) -> dict[str, float]:
    """Return the numbers that the results of some runs have; no file is read where nothing is wanted."""
    if not readings:
        return {}
    results: list[MetricResult] = []
    for run in runs:
        results += results_from_json(tracker.json_of(run, "metrics.json"))
    return read_gates(results, readings)


def records_of(tracker: Tracker, main_run: str) -> RunRecords | str:
    """Return the records that a main run's evaluation has left, or the reason why there are none."""
    evaluate = tracker.child_ids(main_run).get("evaluate")
    if evaluate is None:
        return f"run {main_run[:8]} has no evaluate run"
    return RunRecords.read(tracker.fetch(evaluate, RECORDS))
