"""The commands with engine=ray: the records and answers of one process, and an end like any other when interrupted."""

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlflow
import psutil
import pytest

from mlflow_compress.records import Generations, RunRecords
from mlflow_compress.tracking.tracker import Tracker
from tests.waiting import until

ROOT = Path(__file__).parents[2]
LITTLE = ["--limit", "2", "--task_args", "noise_items=2", "--answer_args", "instruction_limit=1,num_samples=2"]
LITTLE += ["--answer_args", "max_new_tokens=8,judge_max_tokens=8", "--speed", "false"]
COMMANDS = {
    "main": ["main", "--method", "rtn", "--bits", "4", *LITTLE],
    "sweep": ["sweep", "--methods", "rtn", "--bits", "8,4", *LITTLE],
}
RAY = ["--engine", "ray", "--engine_args", "workers=2"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray (pip install -e '.[ray]')"),
]


def tracker_of(folder: Path) -> Tracker:
    mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
    return Tracker()


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start a command in a folder, with a store of its own."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"  # MLflow runs "python"
    environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder / 'mlflow.db'}"
    return subprocess.Popen(
        [sys.executable, "-m", "mlflow_compress", *options],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def found(folder: Path, *options: str) -> dict[str, Any]:
    """Run a command, and return every table of its records and answers."""
    process = start(folder, *options)
    _, said = process.communicate()
    assert process.returncode == 0, said[-5000:]
    tracker, tables = tracker_of(folder), {}
    assert {run.info.status for run in tracker.client.search_runs([tracker.experiment_id])} == {"FINISHED"}
    once = Counter(stage for stage in ("baseline", "baseline-answers") for _ in tracker.find_finished(stage))
    assert once == {"baseline": 1, "baseline-answers": 1}
    for stage, part in (("baseline", "records"), ("baseline", "noise"), ("evaluate", "records")):
        for run in tracker.find_finished(stage):
            records = RunRecords.read(tracker.fetch(run.info.run_id, part))
            for kind in ("option_scores", "option_distances", "token_scores", "token_distances"):
                if getattr(records, kind) is not None:
                    tables[f"{run.info.run_name} {part} {kind}"] = getattr(records, kind).table
    for stage, part in (("baseline-answers", "records"), ("baseline-answers", "samples"), ("answers", "samples")):
        for run in tracker.find_finished(stage):
            answers = Generations.read(tracker.fetch(run.info.run_id, part))
            tables[f"{run.info.run_name} {part}"] = answers.table
    return tables


@pytest.mark.parametrize(("command", "n_tables"), [("main", 13), ("sweep", 18)])
def test_a_command_on_two_workers_leaves_the_records_and_answers_of_one_process(
    command: str, n_tables: int, tmp_path: Path
) -> None:
    one, two = (found(tmp_path / name, *COMMANDS[command], *more) for name, more in (("one", []), ("two", RAY)))
    assert len(one) == n_tables and one.keys() == two.keys()
    assert [name for name in one if not one[name].equals(two[name])] == []


def until_workers(process: subprocess.Popen[str], worker: str) -> list[psutil.Process]:
    """Wait for the first worker of a command, and return all processes below it."""

    def with_worker() -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):  # one of them has just ended
            below = psutil.Process(process.pid).children(recursive=True)
            if any(worker in "".join(one.cmdline()) for one in below):
                return below
        return []

    return until(with_worker, process)


@pytest.mark.parametrize(
    ("command", "worker", "number"),
    [
        pytest.param("main", "ray::ClusterWorker", signal.SIGTERM, marks=pytest.mark.ci),
        ("sweep", "ray::VariantWorker.make_variant", signal.SIGINT),
    ],
)
def test_a_command_that_is_interrupted_closes_its_runs_and_ends_its_workers(
    command: str, worker: str, number: signal.Signals, tmp_path: Path
) -> None:
    process = start(tmp_path, *COMMANDS[command], "--judge", "false", *RAY)
    try:
        below = until_workers(process, worker)
        process.send_signal(number)
        process.communicate()
    finally:
        process.kill()
    assert process.returncode == 128 + number
    psutil.wait_procs(below)  # none of them lives on
    tracker = tracker_of(tmp_path)
    states = [run.info.status for run in tracker.client.search_runs([tracker.experiment_id])]
    assert "KILLED" in states and "RUNNING" not in states
