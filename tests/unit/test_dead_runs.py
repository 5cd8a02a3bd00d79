"""Runs of processes that died: closed by the next command, with what they left; those of living ones are left alone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlflow_compress.tracking import live_processes, run_names
from mlflow_compress.tracking.live_processes import dead_processes, is_alive, own_name, scratch_folder
from mlflow_compress.tracking.tracker import Tracker

DIES = """
import os, signal, sys
from pathlib import Path
from mlflow_compress.tracking.live_processes import scratch_folder
from mlflow_compress.tracking.tracker import Tracker
tracker = Tracker()
stage = sys.argv[1]
with tracker.run("x", stage, {}) as run, scratch_folder(tracker.uri) as folder:
    (folder / "half").write_text("half")
    run.log_json({"method": "rtn"}, "parameters.json")
    run.log_file(folder / "half", "records")
    tracker.client.create_logged_model(tracker.experiment_id, name="half", source_run_id=run.run_id)
    print(run.run_id, flush=True)
    if sys.argv[2] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
"""


def processes(workdir: Path) -> list[str]:
    return sorted(path.name for path in (workdir / ".mlflow_compress" / "processes").rglob("*") if path.is_file())


@pytest.mark.ci
@pytest.mark.slow  # two processes that import MLflow
def test_the_next_command_closes_what_a_killed_process_left(workdir: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", DIES, stage, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for stage, how in (("main", "dies"), ("evaluate", "lives"))
    ]
    ids = [process.stdout.readline().strip() for process in started if process.stdout]
    assert started[0].wait() == -signal.SIGKILL
    tracker = Tracker()
    killed, living = (tracker.client.get_run(run_id) for run_id in ids)
    assert (killed.info.status, living.info.status) == ("KILLED", "RUNNING")
    assert killed.data.tags[run_names.ERROR] == "the process was killed"
    # The parameters stay, because `resume` reads them. Half of the results does not.
    assert [entry.path for entry in tracker.client.list_artifacts(ids[0])] == ["parameters.json"]
    models = tracker.client.search_logged_models([killed.info.experiment_id])
    assert [model.source_run_id for model in models] == [ids[1]]
    assert living.data.tags[run_names.PROCESS] in "".join(processes(workdir))
    assert killed.data.tags[run_names.PROCESS] not in "".join(processes(workdir))  # its scratch folder too

    started[1].communicate("")
    assert tracker.client.get_run(ids[1]).info.status == "FINISHED"
    assert not any(living.data.tags[run_names.PROCESS] in name for name in processes(workdir))


def test_a_process_knows_itself_alive(tracker: Tracker) -> None:
    name = own_name(tracker.uri)
    assert str(os.getpid()) in name and is_alive(tracker.uri, name)
    with dead_processes(tracker.uri) as dead:
        assert name not in dead
    assert not is_alive(tracker.uri, "host-1-0123456789ab")


def test_a_dead_process_is_forgotten_only_when_its_runs_are_closed(tracker: Tracker) -> None:
    own_name(tracker.uri)
    [mine] = (path for path in live_processes._place(tracker.uri).iterdir() if path.suffix == ".lock")
    left = mine.with_name("host-1-0123456789ab.lock")  # nobody holds it
    left.touch()
    with pytest.raises(OSError, match="away"), dead_processes(tracker.uri) as dead:
        assert dead == ["host-1-0123456789ab"]
        raise OSError("the store is away")
    with dead_processes(tracker.uri) as dead:
        assert dead == ["host-1-0123456789ab"]
    with dead_processes(tracker.uri) as dead:
        assert dead == []
    assert mine.exists()


def test_scratch_folders_go_with_their_block(tracker: Tracker) -> None:
    with scratch_folder(tracker.uri) as folder:
        (folder / "a").write_text("1")
    assert not folder.exists()


def test_runs_name_their_process_and_end_without_it(tracker: Tracker) -> None:
    with tracker.run("x", "quantize", {}) as run:
        assert live_processes.open_runs(tracker.uri) == {run.run_id}
        assert tracker.client.get_run(run.run_id).data.tags[run_names.PROCESS] == own_name(tracker.uri)
    assert live_processes.open_runs(tracker.uri) == frozenset()
