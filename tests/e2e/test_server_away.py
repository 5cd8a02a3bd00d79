"""A tracking server that dies in the middle of an evaluation: a wait if it comes back, and `resume` if it comes late."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from benchmarks.local_servers import TrackingServer
from mlflow_compress import demo
from mlflow_compress.lifetime import STORE_AWAY
from mlflow_compress.tracking.lease import PREFIX

pytestmark = pytest.mark.slow


@pytest.fixture
def server(workdir: Path) -> Iterator[TrackingServer]:
    with TrackingServer(workdir, f"sqlite:///{workdir / 'mlflow.db'}") as started:
        yield started


def command(server: TrackingServer, workdir: Path, *arguments: str, wait: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "MLFLOW_TRACKING_URI": server.uri,
        "MLFLOW_COMPRESS_HOME": str(workdir / "home"),
        "MLFLOW_COMPRESS_SERVER_WAIT": str(wait),
        "MLFLOW_EXPERIMENT_NAME": "served",  # the artifacts of "Default" lie in a folder
    }
    return subprocess.Popen(
        [sys.executable, "-m", "mlflow_compress", *arguments],
        cwd=workdir,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def evaluate(server: TrackingServer, workdir: Path, wait: int) -> subprocess.Popen[str]:
    options = ["--checkpoint", str(workdir / "variant"), "--limit", "2"]
    return command(server, workdir, "evaluate", *options, wait=wait)


@pytest.fixture
def variant(workdir: Path, no_fresh_process: None) -> None:
    from mlflow_compress.compression import compress_model

    compress_model(str(demo.MODEL_DIR), "rtn", None, [], workdir / "variant")


def runs(server: TrackingServer) -> Counter[tuple[str, str]]:
    client = MlflowClient(server.uri)
    found = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return Counter((run.data.tags["stage"], run.info.status) for run in found)


def kill_when_the_baseline_runs(server: TrackingServer, process: subprocess.Popen[str]) -> None:
    while ("baseline", "RUNNING") not in runs(server):
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    server.kill()


@pytest.mark.usefixtures("variant")
@pytest.mark.filterwarnings("ignore")
def test_a_restart_costs_a_wait_and_a_long_absence_a_resume(server: TrackingServer, workdir: Path) -> None:
    late = evaluate(server, workdir, wait=2)
    kill_when_the_baseline_runs(server, late)
    said, complaint = late.communicate()
    assert late.returncode == STORE_AWAY and said == ""
    assert "Traceback" not in complaint and complaint.count("does not answer") >= 1
    [last] = [line for line in complaint.splitlines() if line.startswith("mlflow-compress: ")]
    assert "kept on this machine" in last and "mlflow-compress resume" in last

    server.start()
    assert runs(server) == {("evaluate", "RUNNING"): 1, ("baseline", "RUNNING"): 1}
    resumed = command(server, workdir, "resume", wait=120)
    said, complaint = resumed.communicate()
    assert resumed.returncode == 0, complaint
    assert said.startswith("finished: evaluate") and "1 command: 1 finished" in said
    assert runs(server) == {("evaluate", "FINISHED"): 1, ("baseline", "FINISHED"): 1}
    client = MlflowClient(server.uri)
    tags = [tag for experiment in client.search_experiments() for tag in experiment.tags]
    assert not any(tag.startswith(PREFIX) for tag in tags)  # the lease is given back
    assert client.search_registered_models() == []  # and it is not in the user's registry
    nothing = command(server, workdir, "resume", wait=120)
    assert "Nothing is left to do" in nothing.communicate()[0] and nothing.returncode == 0


@pytest.mark.usefixtures("variant")
@pytest.mark.filterwarnings("ignore")
def test_a_restart_costs_a_wait(server: TrackingServer, workdir: Path) -> None:
    waits = evaluate(server, workdir, wait=300)
    kill_when_the_baseline_runs(server, waits)
    time.sleep(15)
    server.start()
    said, complaint = waits.communicate()
    assert waits.returncode == 0, complaint
    assert "Waiting for the tracking server" in complaint and "answers again" in complaint
    assert "(evaluated now)" in said
    assert runs(server) == {("evaluate", "FINISHED"): 1, ("baseline", "FINISHED"): 1}
