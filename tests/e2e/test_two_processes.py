"""The main job on the demo in two processes: the records of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest

from mlflow_compress.records import RunRecords
from mlflow_compress.tracking.tracker import Tracker

ROOT = Path(__file__).parents[2]
COMMAND = ["-m", "mlflow_compress", "main", "--method", "rtn", "--bits", "4", "--judge", "false", "--limit", "12"]


def records(folder: Path, *launcher: str) -> dict[str, RunRecords]:
    """Run the job in a folder with a store of its own; return the records of baseline, noise run and variant."""
    folder.mkdir()
    store = f"sqlite:///{folder / 'mlflow.db'}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": store}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"  # MLflow runs "python"
    command = [sys.executable, *launcher, *COMMAND, "--out", str(folder / "compressed")]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    mlflow.set_tracking_uri(store)
    tracker = Tracker()
    [baseline], [variant] = tracker.find_finished("baseline"), tracker.find_finished("evaluate")
    assert {r.info.status for r in tracker.client.search_runs([tracker.experiment_id])} == {"FINISHED"}
    places = {"baseline": (baseline, "records"), "noise": (baseline, "noise"), "variant": (variant, "records")}
    return {name: RunRecords.read(tracker.fetch(run.info.run_id, part)) for name, (run, part) in places.items()}


@pytest.mark.slow
@pytest.mark.ci
def test_two_processes_leave_the_records_of_one(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    one, two = records(tmp_path / "one"), records(tmp_path / "two", *launcher)
    for name, first in one.items():
        for kind in ("option_scores", "option_distances", "token_scores", "token_distances", "generations"):
            ours, theirs = getattr(first, kind), getattr(two[name], kind)
            assert (ours is None) == (theirs is None), (name, kind)
            assert ours is None or ours.table.equals(theirs.table), (name, kind)
    assert one["variant"].option_distances is not None and two["noise"].token_distances is not None
