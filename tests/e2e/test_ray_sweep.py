"""Sweeps with engine=ray: variants side by side on workers, with the records of one process, whatever is lost."""

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlflow_compress.records import Generations, RunRecords
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker
from tests.e2e.test_sweep import tracker_of

ROOT = Path(__file__).parents[2]
KINDS = ("option_scores", "option_distances", "token_scores", "token_distances")
FEW = ["--methods=rtn", "--bits=8,4", "--limit=1", "--noise_items=2", "--speed=false"]
ANSWERS = ["--instruction_limit=1", "--num_samples=2", "--max_new_tokens=8", "--judge_max_tokens=8"]
SCORED = [*FEW, "--judge=false"]
RAY = ["--engine=ray", "--workers=2"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray (pip install -e '.[ray]')"),
]


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start a sweep in a folder, with a store of its own."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder / 'mlflow.db'}"
    return subprocess.Popen(
        [sys.executable, "-m", "mlflow_compress", "sweep", *options],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for a sweep that must succeed."""
    _, said = process.communicate()
    assert process.returncode == 0, said[-5000:]


def until(process: subprocess.Popen[str], words: str) -> None:
    """Read what a sweep says, up to a line with these words."""
    for line in process.stderr:
        if words in line:
            return
    raise AssertionError(f"it ended without {words!r}")


def states(tracker: Tracker) -> list[str]:
    """The status of every run of a store."""
    experiments = [one.experiment_id for one in tracker.client.search_experiments()]
    return [str(run.info.status) for run in tracker.client.search_runs(experiments)]


def tables(folder: Path) -> dict[str, Any]:
    """Every table of the baseline's and the variants' records and answers."""
    tracker, found = tracker_of(folder), {}
    for stage in ("baseline", "evaluate"):
        for run in tracker.find_finished(stage):
            records = RunRecords.read(tracker.fetch(run.info.run_id, run_names.RECORDS))
            for kind in KINDS:
                if getattr(records, kind) is not None:
                    found[f"{stage} {run.data.tags.get('variant')} {kind}"] = getattr(records, kind).table
    for run in [*tracker.find_finished("baseline-answers"), *tracker.find_finished("answers")]:
        samples = Generations.read(tracker.fetch(run.info.run_id, "samples"))
        found[f"answers {run.info.run_name}"] = samples.table
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any], n: int) -> None:
    assert len(one) == n and one.keys() == other.keys()
    assert [name for name in one if not one[name].equals(other[name])] == []


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process records."""
    folder = tmp_path_factory.mktemp("alone")
    finish(start(folder, *SCORED))
    return tables(folder)


def test_a_worker_that_is_killed_costs_its_variant_a_retry(alone: dict[str, Any], tmp_path: Path) -> None:
    process = start(tmp_path, *SCORED, *RAY)
    try:
        until(process, "[2/2] evaluate")
        below = psutil.Process(process.pid).children(recursive=True)
        makers = [one for one in below if "ray::VariantWorker.make_variant" in " ".join(one.cmdline())]
        assert len(makers) == 2  # side by side
        makers[0].kill()
        finish(process)
    finally:
        process.kill()
    assert_same(alone, tables(tmp_path), 10)
    tracker = tracker_of(tmp_path)
    [parent] = tracker.find_finished("sweep")
    mains = [tracker.look_up(run) for run in tracker.find_unfinished("main")]
    assert [main.tags[run_names.SWEEP_RUN] for main in mains] == [parent.info.run_id]
    assert set(states(tracker)) == {"FINISHED", "KILLED"}
    assert len(tracker.find_finished("main")) == 2 and len(tracker.find_finished("baseline")) == 1


def test_judged_variants_have_the_records_and_answers_of_one_process(tmp_path: Path) -> None:
    found = []
    for name, more in (("one", []), ("two", RAY)):
        finish(start(tmp_path / name, *FEW, *ANSWERS, *more))
        found.append(tables(tmp_path / name))
        tracker = tracker_of(tmp_path / name)
        assert set(states(tracker)) == {"FINISHED"}
        assert len(tracker.find_finished("baseline-answers")) == 1
    assert_same(*found, 13)


def test_a_sweep_that_is_interrupted_leaves_no_run_open_and_goes_on(alone: dict[str, Any], tmp_path: Path) -> None:
    process = start(tmp_path, *SCORED, *RAY)
    try:
        until(process, "[2/2] evaluate")
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130
    psutil.wait_procs(below)  # none of them lives on
    assert "RUNNING" not in states(tracker_of(tmp_path))
    finish(start(tmp_path, *SCORED, *RAY))
    assert_same(alone, tables(tmp_path), 10)
