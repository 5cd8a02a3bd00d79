"""Which runs of a store may be deleted, and what that frees."""

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mlflow.entities import LoggedModel, Run
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from mlflow_compress.errors import ConfigError
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.experiment import every_page, search_runs
from mlflow_compress.tracking.tracker import Tracker

_RUN_ID = re.compile(r"\b[0-9a-f]{32}\b")
_MEASURED = frozenset({"main", "baseline", "quantize", "evaluate", "judge", "speed", "diagnose"})  # not decisions
_DAY_MS = 86_400_000


@dataclass(frozen=True, kw_only=True)
class Deletable:
    """A run that nothing needs."""

    run_id: str
    name: str
    stage: str
    ended: int  # Milliseconds since 1970
    size_bytes: int  # Of its artifacts and its models' files
    models: tuple[str, ...]  # Ids of its logged models


def deletable_runs(
    tracker: Tracker, *, days: float, label: str | None = None, experiment: str | None = None
) -> tuple[list[Deletable], dict[str, int]]:
    """Return the runs that may be deleted, of one baseline or in one experiment if wanted, and why others stay.

    A run stays that is registered as a version, that has a receipt, that ended in the last `days`, that has not ended,
    or that decides. With a run stay its parent, its children, and every run that its tags name, as its baseline's.
    """
    only = None
    if experiment is not None:
        named = tracker.client.get_experiment_by_name(experiment)
        if named is None:
            raise ConfigError("The store has no such experiment", got=experiment)
        only = named.experiment_id
    every = search_runs(tracker.client, f"tags.`{run_names.STAGE}` LIKE '%'")
    runs = {str(run.info.run_id): run for run in every}
    models = _models(tracker, {str(run.info.experiment_id) for run in every})
    versions = every_page(tracker.client.search_model_versions)
    registered = {str(version.run_id) for version in versions}
    by_id = {model.model_id: run_id for run_id, own in models.items() for model in own}
    registered |= {by_id[version.model_id] for version in versions if version.model_id in by_id}
    since = time.time() * 1000 - days * _DAY_MS
    reasons: dict[str, str] = {}
    for run_id, run in runs.items():
        elsewhere = only not in (None, run.info.experiment_id)
        if reason := "of other experiments" if elsewhere else _own_reason(run, registered, since, label):
            reasons[run_id] = reason
    _keep_needed(runs, reasons)
    gone = [_deletable(run, models.get(run_id, [])) for run_id, run in runs.items() if run_id not in reasons]
    return sorted(gone, key=lambda one: -one.size_bytes), dict(Counter(reasons.values()))


def _own_reason(run: Run, registered: set[str], since: float, label: str | None) -> str:
    tags = run.data.tags
    if run.info.run_id in registered:
        return "registered as a version"
    if run_names.RECEIPT in tags:
        return "with a receipt"
    if tags[run_names.STAGE] not in _MEASURED:
        return "decisions, sweeps and searches"
    if label is not None and tags.get(run_names.BASE_MODEL) != label:
        return "of other models"
    if run.info.end_time is None:
        return "not ended"
    return "too young" if run.info.end_time > since else ""


def _keep_needed(runs: Mapping[str, Run], reasons: dict[str, str]) -> None:
    """Add parents, children, and the runs that the tags of those name that stay."""
    children: dict[str, list[str]] = {}
    for run_id, run in runs.items():
        children.setdefault(run.data.tags.get(run_names.PARENT, ""), []).append(run_id)
    left = list(reasons)
    while left:
        run_id = left.pop()
        named = {one for text in runs[run_id].data.tags.values() for one in _RUN_ID.findall(text)}
        for other in (*named, *children.get(run_id, ())):
            if other in runs and other not in reasons:
                reasons[other] = "needed by a run that stays"
                left.append(other)


def _models(tracker: Tracker, experiments: Iterable[str]) -> dict[str, list[LoggedModel]]:
    """Return the logged models of some experiments by the run that made them."""
    models: dict[str, list[LoggedModel]] = {}
    for model in every_page(tracker.client.search_logged_models, list(experiments)) if experiments else ():
        models.setdefault(str(model.source_run_id), []).append(model)
    return models


def _deletable(run: Run, models: Iterable[LoggedModel]) -> Deletable:
    places = [run.info.artifact_uri, *(model.artifact_location for model in models)]
    return Deletable(
        run_id=str(run.info.run_id),
        name=str(run.info.run_name),
        stage=run.data.tags[run_names.STAGE],
        ended=int(run.info.end_time),
        size_bytes=sum(map(_size, places)),
        models=tuple(str(model.model_id) for model in models),
    )


def _size(place: str) -> int:
    repository, total, folders = get_artifact_repository(place), 0, [None]
    while folders:
        for entry in repository.list_artifacts(folders.pop()):
            if entry.is_dir:
                folders.append(entry.path)
            total += entry.file_size or 0
    return total


def mark_deleted(tracker: Tracker, runs: Iterable[Deletable]) -> None:
    """Put runs and their models into MLflow's stage "deleted", which `mlflow gc` frees and until then is undone."""
    for run in runs:
        for model in run.models:
            tracker.client.delete_logged_model(model)
        tracker.client.delete_run(run.run_id)
