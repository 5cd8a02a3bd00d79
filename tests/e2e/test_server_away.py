"""A tracking server that dies in the middle of an evaluation: a wait if it comes back, and `resume` if it comes late."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from benchmarks.local_servers import TrackingServer
from mlflow_compress import demo
from mlflow_compress.lifetime import STORE_AWAY
from mlflow_compress.tracking.lease import PREFIX
from tests.waiting import until

pytestmark = pytest.mark.slow

PATIENT = 10**6  # seconds for which a server is waited for: as many as it takes
# The command line, which waits in the middle of the baseline's evaluation until it is told to go on.
HELD = """
import sys, time
from pathlib import Path
from mlflow_compress.cli import main
from mlflow_compress.commands.evaluate import baseline
from mlflow_compress.lifetime import end_with_parent

end_with_parent()
whole = baseline._run_twice

def held(*args, **options):
    Path("held").touch()
    while not Path("go on").exists():
        time.sleep(0.01)
    return whole(*args, **options)

baseline._run_twice = held
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def server(workdir: Path) -> Iterator[TrackingServer]:
    with TrackingServer(workdir, f"sqlite:///{workdir / 'mlflow.db'}") as started:
        yield started


def command(server: TrackingServer, workdir: Path, *arguments: str, wait: int = PATIENT) -> subprocess.Popen[str]:
    """Start Python with these arguments."""
    environment = {
        **os.environ,
        "MLFLOW_TRACKING_URI": server.uri,
        "MLFLOW_COMPRESS_HOME": str(workdir / "home"),
        "MLFLOW_COMPRESS_SERVER_WAIT": str(wait),
        "MLFLOW_EXPERIMENT_NAME": "served",  # the artifacts of "Default" lie in a folder
    }
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=workdir,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def evaluate(server: TrackingServer, workdir: Path, wait: int) -> subprocess.Popen[str]:
    options = ["--checkpoint", str(workdir / "variant"), "--limit", "2"]
    return command(server, workdir, "-c", HELD, "evaluate", *options, wait=wait)


RESUME = ("-m", "mlflow_compress", "resume")


@pytest.fixture
def variant(workdir: Path, no_fresh_process: None) -> None:
    from mlflow_compress.compression import compress_model

    compress_model(str(demo.MODEL_DIR), "rtn", None, [], workdir / "variant")


def runs(server: TrackingServer) -> Counter[tuple[str, str]]:
    client = MlflowClient(server.uri)
    found = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return Counter((run.data.tags["stage"], run.info.status) for run in found)


def kill_when_the_baseline_runs(server: TrackingServer, workdir: Path, process: subprocess.Popen[str]) -> None:
    until((workdir / "held").exists, ended=lambda: process.poll() is not None, said=process.communicate)
    assert ("baseline", "RUNNING") in runs(server)
    server.kill()
    (workdir / "go on").touch()


@pytest.mark.usefixtures("variant")
@pytest.mark.filterwarnings("ignore")
def test_a_restart_costs_a_wait_and_a_long_absence_a_resume(server: TrackingServer, workdir: Path) -> None:
    late = evaluate(server, workdir, wait=2)
    kill_when_the_baseline_runs(server, workdir, late)
    said, complaint = late.communicate()
    assert late.returncode == STORE_AWAY and said == ""
    assert "Traceback" not in complaint and complaint.count("has not answered") >= 1
    [last] = [line for line in complaint.splitlines() if line.startswith("mlflow-compress: ")]
    assert "saved on this machine" in last and "mlflow-compress resume" in last

    server.start()
    assert runs(server) == {("evaluate", "RUNNING"): 1, ("baseline", "RUNNING"): 1}
    resumed = command(server, workdir, *RESUME)
    said, complaint = resumed.communicate()
    assert resumed.returncode == 0, complaint
    assert said.startswith("finished: evaluate") and "1 command: 1 finished" in said
    assert runs(server) == {("evaluate", "FINISHED"): 1, ("baseline", "FINISHED"): 1}
    client = MlflowClient(server.uri)
    tags = [tag for experiment in client.search_experiments() for tag in experiment.tags]
    assert not any(tag.startswith(PREFIX) for tag in tags)  # the lease is given back
    assert client.search_registered_models() == []  # and it is not in the user's registry
    nothing = command(server, workdir, *RESUME)
    assert "Nothing to resume" in nothing.communicate()[0] and nothing.returncode == 0


@pytest.mark.usefixtures("variant")
@pytest.mark.filterwarnings("ignore")
def test_a_restart_costs_a_wait(server: TrackingServer, workdir: Path) -> None:
    waits = evaluate(server, workdir, wait=PATIENT)
    kill_when_the_baseline_runs(server, workdir, waits)
    assert waits.stderr is not None
    assert any("Waiting for the tracking server" in line for line in waits.stderr)  # read up to there
    server.start()
    said, complaint = waits.communicate()
    assert waits.returncode == 0, complaint
    assert "answers again" in complaint
    assert "(evaluated now)" in said
    assert runs(server) == {("evaluate", "FINISHED"): 1, ("baseline", "FINISHED"): 1}
