"""The commands with engine=ray: the records and answers of one process, and an end like any other when interrupted."""

import contextlib
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from mlflow_compress.records import Generations, RunRecords
from tests.e2e.test_sweep import tracker_of
from tests.waiting import until

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "mlflow_compress", "main", "--method", "rtn", "--bits", "4", "--limit", "2"]
LITTLE = ["--noise_items", "2", "--instruction_limit", "1", "--num_samples", "2", "--max_new_tokens", "8"]
RAY = ["--engine", "ray", "--workers", "2"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray (pip install -e '.[ray]')"),
]


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    """Start the main job in a folder, with a store of its own."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"  # MLflow runs "python"
    environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder / 'mlflow.db'}"
    return subprocess.Popen(
        [*COMMAND, *LITTLE, *more],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def found(folder: Path, *more: str) -> dict[str, object]:
    """Run the job, and return every table of its records and answers."""
    process = start(folder, *more)
    _, said = process.communicate()
    assert process.returncode == 0, said[-5000:]
    tracker = tracker_of(folder)
    assert {r.info.status for r in tracker.client.search_runs([tracker.experiment_id])} == {"FINISHED"}
    tables: dict[str, object] = {}
    for stage, part in (("baseline", "records"), ("baseline", "noise"), ("evaluate", "records")):
        [run] = tracker.find_finished(stage)
        records = RunRecords.read(tracker.fetch(run.info.run_id, part))
        for kind in ("option_scores", "option_distances", "token_scores", "token_distances"):
            if getattr(records, kind) is not None:
                tables[f"{stage} {part} {kind}"] = getattr(records, kind).table
    for stage, part in (("baseline-answers", "records"), ("baseline-answers", "samples"), ("answers", "samples")):
        [run] = tracker.find_finished(stage)
        tables[f"{stage} {part}"] = Generations.read(tracker.fetch(run.info.run_id, part)).table
    return tables


def test_the_job_on_two_workers_leaves_the_records_and_answers_of_one_process(tmp_path: Path) -> None:
    one, two = found(tmp_path / "one"), found(tmp_path / "two", *RAY)
    assert len(one) == 13 and one.keys() == two.keys()
    assert [name for name in one if not one[name].equals(two[name])] == []  # type: ignore[attr-defined]


def until_workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Wait for the first worker of a job, and return all processes below it."""

    def with_worker() -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):  # one of them has just ended
            below = psutil.Process(process.pid).children(recursive=True)
            if any("ray::ClusterWorker" in "".join(one.cmdline()) for one in below):
                return below
        return []

    return until(with_worker, process)


@pytest.mark.ci
def test_a_job_that_is_interrupted_closes_its_runs_and_ends_its_workers(tmp_path: Path) -> None:
    process = start(tmp_path, "--judge", "false", *RAY)
    try:
        below = until_workers(process)
        process.send_signal(signal.SIGTERM)
        process.communicate()
    finally:
        process.kill()
    assert process.returncode == 143
    psutil.wait_procs(below)  # none of them lives on
    tracker = tracker_of(tmp_path)
    states = [run.info.status for run in tracker.client.search_runs([tracker.experiment_id])]
    assert "KILLED" in states and "RUNNING" not in states
