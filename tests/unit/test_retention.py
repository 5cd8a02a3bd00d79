"""Retention: what nothing needs may be deleted; what an alias, a receipt or a decision needs never is."""

from __future__ import annotations

import time

import pytest

import mlflow_compress as mc
from mlflow_compress import cli
from mlflow_compress.errors import ConfigError
from mlflow_compress.tracking import run_names as names
from mlflow_compress.tracking.tracker import Tracker

HOUR = 3_600_000


def made(tracker: Tracker, stage: str, name: str, *, days: float = 100, ended: bool = True, **tags: str) -> str:
    """Make a run that ended some days ago, with an artifact of 1,000 bytes."""
    now = int(time.time() * 1000 - 24 * HOUR * days)
    every = {names.STAGE: stage, names.BASE_MODEL: "demo", **tags}
    run = tracker.client.create_run(tracker.experiment_id, start_time=now, tags=every, run_name=name)
    tracker.client.log_text(run.info.run_id, "x" * 1000, "folder/file.txt")
    if ended:
        tracker.client.set_terminated(run.info.run_id, end_time=now)
    return str(run.info.run_id)


def variant(tracker: Tracker, name: str, baseline: str, evaluate: dict[str, str] | None = None) -> tuple[str, str]:
    main = made(tracker, "main", name)
    child = {names.PARENT: main, names.BASELINE_RUN: baseline, **(evaluate or {})}
    return main, made(tracker, "evaluate", name, **child)


def test_what_nothing_needs_is_deleted_and_nothing_else(tracker: Tracker) -> None:
    client = tracker.client
    base, lone = made(tracker, "baseline", "base"), made(tracker, "baseline", "lone")
    plain = variant(tracker, "plain", lone)
    signed = variant(tracker, "signed", base, {names.RECEIPT: "a" * 64})
    shared = variant(tracker, "shared", base)  # another variant was found equal, and has its evaluation
    champion = variant(tracker, "champion", base, {names.SKIPPED: f"evaluation: found in run {shared[1]}"})
    young = made(tracker, "main", "young", days=10)
    running = made(tracker, "main", "running", ended=False)
    decision = made(tracker, "promote", "decision")
    model = client.create_logged_model(tracker.experiment_id, name="m", source_run_id=champion[0])
    spare = client.create_logged_model(tracker.experiment_id, name="spare", source_run_id=plain[0])
    client.create_registered_model("compressed-demo")
    source = {"source": f"models:/{model.model_id}", "run_id": champion[0], "model_id": model.model_id}
    version = client.create_model_version("compressed-demo", **source)
    client.set_registered_model_alias("compressed-demo", "champion", version.version)
    foreign = client.create_run(tracker.experiment_id, start_time=1)  # not ours
    client.set_terminated(foreign.info.run_id, end_time=2)

    found = mc.gc()
    assert {run.run_id for run in found.runs} == {lone, *plain}
    assert found.size_bytes == 3000 and not found.deleted
    assert sum(found.kept.values()) == len({base, *signed, *shared, *champion, young, running, decision})
    stages = {one: client.get_run(one).info.lifecycle_stage for one in (lone, *plain)}
    assert set(stages.values()) == {"active"}  # a dry run changes nothing
    assert {run.run_id for run in mc.gc(older_than=5).runs} == {lone, *plain, young}
    assert mc.gc(base_model="another").runs == []
    client.create_experiment("empty")
    assert mc.gc(experiment="empty").runs == []
    with pytest.raises(ConfigError, match="no such experiment"):
        mc.gc(experiment="missing")

    assert cli.main(["gc", "--delete", "true"]) == 0
    for one in (lone, *plain):
        assert client.get_run(one).info.lifecycle_stage == "deleted"
    for one in (base, *signed, *shared, *champion, young, running, decision, foreign.info.run_id):
        assert client.get_run(one).info.lifecycle_stage == "active"
    left = {m.model_id for m in client.search_logged_models([tracker.experiment_id])}
    assert left == {model.model_id} and spare.model_id not in left
    assert mc.gc().runs == []
