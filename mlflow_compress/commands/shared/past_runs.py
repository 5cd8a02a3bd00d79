"""What earlier runs say: values that candidates compete by, and the runtime of a speed stage."""

from collections.abc import Iterable, Mapping
from typing import Any

from mlflow_compress.commands.shared.named_models import SERVED_METHOD, compresses
from mlflow_compress.commands.shared.stored import METRICS_FILE, results_in
from mlflow_compress.config.declarations import NONE
from mlflow_compress.decide.gates import without_speed
from mlflow_compress.decide.promotion import EVERY_SLICE, Candidate, PolicyGates, read_gates
from mlflow_compress.decide.scoreboard import NO_SPEED_STAGE
from mlflow_compress.errors import ConfigError, raise_together
from mlflow_compress.records import MetricResult
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.evaluations import Variant, items_in
from mlflow_compress.tracking.store import RESOLVED
from mlflow_compress.tracking.tracker import Tracker

_DESCRIBED = "speed_"  # before the names of the parameters that describe the runtime
_PARTS = ("runtime", "device", "dtype", "threads")
_SKIPPED = "speed: "


def skipped_tag(reason: str) -> dict[str, str]:
    """Return the tag of a stage's run that has timed nothing."""
    return {run_names.SKIPPED: f"{_SKIPPED}{reason}"}


def description(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of a stage's run that describe the runtime: its version, device, dtype and threads."""
    return {f"{_DESCRIBED}{name}": tags[name] for name in _PARTS if name in tags}


def described_runtime(run: Any) -> dict[str, str]:
    """Return what describes the runtime of a stage's run; nothing where nothing was timed."""
    params = run.data.params
    return {name: params[f"{_DESCRIBED}{name}"] for name in _PARTS if f"{_DESCRIBED}{name}" in params}


def timed_in(run: Any | None) -> tuple[str, str]:
    """Return the runtime of a speed stage with its version, and why there is none; one of the two is empty."""
    if run is None:
        return "", NO_SPEED_STAGE
    if run.info.status != "FINISHED":
        return "", f"the speed stage failed: {run.data.tags.get(run_names.RUN_ERROR, run.info.status)}"
    if run_names.SKIPPED in run.data.tags:
        return "", run.data.tags[run_names.SKIPPED].removeprefix(_SKIPPED)
    return described_runtime(run)["runtime"], ""


_MEASURING = ("evaluate", "judge", "speed")  # stages whose runs hold results
_QUANTIZE = "quantize"  # its run has every size of the checkpoint


def candidates_of(
    tracker: Tracker, variants: Iterable[Variant], label: str, versions: Mapping[str, str], policy: PolicyGates
) -> list[Candidate]:
    """Return variants as candidates of a policy.

    What a policy reads besides the standard gates is found with one search per stage, and only where it is needed. A
    task or category of the policy that no variant has results of is a `ConfigError`.
    """
    stages = _MEASURING if policy.readings or policy.asks_stages else ()
    children = _finished_children(tracker, label, (*stages, *([_QUANTIZE] if policy.asks_sizes else [])))
    candidates = []
    places: set[tuple[str, str]] = set()
    for variant in variants:
        run = variant.run
        below = children.get(run.info.run_id, {})
        measured = [run for stage, run in below.items() if stage != _QUANTIZE]
        results = results_of(tracker, measured) if policy.readings else []
        places |= {(result.task or "", result.category or "") for result in results}
        candidates.append(
            candidate_of(
                variant.name,
                run,
                read_gates(results, policy.readings),
                below if stages or policy.asks_sizes else None,
                makes=None if made_once(run) else variant.makes,
                version=versions.get(run.info.run_id),
            )
        )
    if places:
        read = {(reading.task, reading.category) for reading in policy.readings}
        missing = sorted(place for place in read - places if place[0] not in ("", EVERY_SLICE))
        named = sorted("/".join(filter(None, place)) for place in places if place[0])
        what = "The policy reads a task or category for which no run of this evaluation has results"
        raise_together([ConfigError(what, allowed=named, got="/".join(filter(None, place))) for place in missing])
    return candidates


def candidate_of(
    name: str,
    run: Any,
    read: Mapping[str, float],
    stages: Mapping[str, Any] | None,
    *,
    makes: int | None,
    version: str | None = None,
) -> Candidate:
    """Return a main run as a candidate of a policy.

    - `read`: What its gates read besides the metrics of the run.
    - `stages`: The runs of its stages; None where the policy does not ask.
    """
    made = stages[_QUANTIZE].data.metrics if stages and _QUANTIZE in stages else {}
    sizes = {size: value for size, value in made.items() if size.startswith("size/")}
    metrics = {**sizes, **run.data.metrics, **read}
    method, servers = run.data.tags[run_names.METHOD], run.data.tags.get(run_names.SERVED_BY)
    return Candidate(
        name=name,
        run_id=run.info.run_id,
        version=version,
        method=method,
        metrics=metrics,
        items=items_in(metrics),
        makes=makes,
        compresses=compresses(method),
        served_by=None if servers is None else tuple(server for server in servers.split(",") if server != NONE),
        served=method == SERVED_METHOD,
        stages=None if stages is None else frozenset(s for s, own in stages.items() if own.info.status == "FINISHED"),
        absent=without_speed(timed_in((stages or {}).get("speed"))[1]),
    )


def made_once(run: Any) -> bool:
    """Return whether the variant of a main run reads no calibration text, so that another make would be the same.

    What others have compressed may have been calibrated: that is not known.
    """
    params = run.data.params
    text = params.get(f"{RESOLVED}calibration", params.get("calibration"))
    return text == NONE and run.data.tags[run_names.METHOD] not in (SERVED_METHOD, "checkpoint")


def _finished_children(tracker: Tracker, label: str, stages: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the newest finished run of some stages of a baseline's main runs, by main run and stage."""
    children: dict[str, dict[str, Any]] = {}
    for stage in stages:
        for run in tracker.find_finished(stage, **{run_names.BASE_MODEL: label}):
            parent = run.data.tags.get(run_names.PARENT)
            if parent is not None:
                children.setdefault(parent, {}).setdefault(stage, run)
    return children


def results_of(tracker: Tracker, runs: Iterable[Any]) -> list[MetricResult]:
    """Return the results that some runs of stages have."""
    return [result for run in runs for result in results_in(tracker.json_of(run, METRICS_FILE), run.info.run_id)]
