"""A sweep on workers, without a cluster: what a worker checks, its share of the limits, runs that killed ones left."""

from dataclasses import replace
from pathlib import Path

import pytest

from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.sweep import on_workers
from mlflow_compress.commands.sweep.make_variant import close_killed
from mlflow_compress.commands.sweep.on_workers import SweepPlace, VariantWorker, _check
from mlflow_compress.commands.sweep.plan import Combination, PreparedVariant
from mlflow_compress.errors import ConfigError, WorkerError
from mlflow_compress.scoring.engine_identity import package_hash
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker
from tests.conftest import Fork

LEAVE_OPEN = """
import os, signal, sys
from mlflow_compress.tracking.tracker import Tracker
tracker = Tracker()
tags = {"sweep_run_id": sys.argv[1], "variant_key": "k", "base_model": "demo", "variant": "rtn"}
with tracker.run("main", "main", tags), tracker.run("answers", "answers", {}, own=False):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def variant(**parameters: object) -> PreparedVariant:
    asked = Combination(name="rtn-4bit", config=MainConfig(**parameters), settings=None)  # type: ignore[arg-type]
    return PreparedVariant(asked=asked, known={"engine": "ray"}, key="k")


def test_a_worker_has_its_share_of_what_all_may_ask_of_judges() -> None:
    limits = {"judge_max_cost": 9.0, "judge_concurrency": 16, "judge_requests_per_minute": 7}
    made = on_workers._on_worker(variant(engine="ray", device="auto", **limits), "cuda", 3)
    config = made.asked.config
    assert (config.running.engine, config.source.device) == ("local", "cuda")
    assert made.known == {"engine": "ray", "device": "cuda"}
    asked = config.judging
    assert (asked.judge_max_cost, asked.judge_concurrency) == (3.0, 5)
    assert (asked.judge_requests_per_minute, asked.judge_tokens_per_minute) == (2, 0)  # 0 stays "no limit"
    fewer = on_workers._on_worker(variant(judge_concurrency=2), "cpu", 5).asked.config
    assert fewer.judging.judge_concurrency == 1


def test_a_worker_that_does_not_see_the_same_is_refused(
    tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://me:secret@judge:1/v1")
    place = SweepPlace.of(tracker, "parent", judge=True)
    assert "secret" not in str(place) and "a-key" not in str(place)
    _check(place)
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ConfigError, match=r"OPENAI_API_KEY is not the same .*Allowed: set\. Got: 'not set'"):
        _check(place)
    _check(replace(place, judge=None))
    with pytest.raises(ConfigError, match=r"locks is not the same on the machine of a worker.*MLFLOW_COMPRESS_HOME"):
        _check(replace(place, judge=None, process="of-another-home"))


def test_workers_have_all_our_code() -> None:
    worker = VariantWorker("cpu", 1)
    assert VariantWorker.code()["package"] == package_hash()
    assert worker.describe().items() >= VariantWorker.code().items()


def killed_below(parent: str, python: Fork) -> None:
    done = python("-c", LEAVE_OPEN, parent)
    assert done.returncode == -9, done.stderr


def status(tracker: Tracker, run_id: str) -> str:
    return str(tracker.client.get_run(run_id).info.status)


def test_runs_that_a_killed_worker_left_open_are_closed(tracker: Tracker, python: Fork) -> None:
    with tracker.run("sweep", "sweep", {}) as parent:
        killed_below(parent.run_id, python)
        [main], [answers] = tracker.find_unfinished("main"), tracker.find_unfinished("answers")
        assert status(tracker, main) == status(tracker, answers) == "RUNNING"
        close_killed(tracker, parent.run_id)
        assert status(tracker, main) == status(tracker, answers) == "KILLED"
        assert status(tracker, parent.run_id) == "RUNNING"


@pytest.mark.slow
@pytest.mark.ci
def test_a_variant_that_takes_its_workers_with_it_is_failed(tracker: Tracker, python: Fork) -> None:
    error = WorkerError("4 workers were lost")
    with tracker.run("sweep", "sweep", {}) as parent:
        with pytest.raises(WorkerError, match="4 workers were lost"):
            on_workers._lost(tracker, parent.run_id, variant(), error)  # none has opened a run
        killed_below(parent.run_id, python)
        found = on_workers._lost(tracker, parent.run_id, variant(), error)
    run = tracker.look_up(found.run_id)
    assert (found.state, found.said) == ("failed", "4 workers were lost.")
    assert status(tracker, found.run_id) == "FAILED" and run.tags[run_names.ERROR] == "4 workers were lost."
