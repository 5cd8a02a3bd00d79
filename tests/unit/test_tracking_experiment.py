"""Where artifacts lie: beside the database, whichever folder a command is started in.

The file of a SQLite store: complete when it is there, made once, whoever starts and whoever is killed.
"""

import importlib.util
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import mlflow
import pytest
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from benchmarks.local_servers import postgres, postgres_folder
from mlflow_compress.tracking import experiment
from mlflow_compress.tracking.experiment import create_database
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.tracking.views import how_to_open
from tests.clock import Clock
from tests.conftest import Fork


@pytest.fixture
def elsewhere(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a store that is not there yet, while commands are started in another."""
    for name in ("store", "start"):
        (workdir / name).mkdir()
    monkeypatch.chdir(workdir / "start")
    uri = f"sqlite:///{workdir / 'store' / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    mlflow.set_tracking_uri(uri)
    return workdir / "store"


def log_something(tracker: Tracker) -> Path:
    """Log an artifact and return where it lies."""
    with tracker.run("x", "main", {}) as run:
        run.log_text("text", "a.txt")
    [found] = Path.cwd().parent.rglob("a.txt")
    said = how_to_open(tracker.client, tracker.uri, run.run_id).splitlines()[0]
    assert said.startswith("Artifacts:") and said.removeprefix("Artifacts:").strip().endswith(str(found.parent))
    return found


def test_a_new_store_has_its_artifacts_beside_it(elsewhere: Path) -> None:
    assert log_something(Tracker()).is_relative_to(elsewhere)
    assert list(Path.cwd().iterdir()) == []


def test_a_store_that_mlflow_made_from_another_folder_gets_an_experiment_beside_it(elsewhere: Path) -> None:
    SqlAlchemyStore(f"sqlite:///{elsewhere / 'mlflow.db'}", "./mlruns")  # as MLflow does, in this folder
    first, second = Tracker(), Tracker()
    assert first.experiment_id == second.experiment_id
    assert first.client.get_experiment(first.experiment_id).name == experiment.DEFAULT_EXPERIMENT
    assert log_something(first).is_relative_to(elsewhere)
    assert list(Path.cwd().iterdir()) == []


def test_artifacts_behind_a_server_are_not_written_to_without_it(elsewhere: Path) -> None:
    SqlAlchemyStore(f"sqlite:///{elsewhere / 'mlflow.db'}", "mlflow-artifacts:/")
    assert log_something(Tracker()).is_relative_to(elsewhere)


@pytest.mark.parametrize("root", ["s3://bucket/mlflow", "file://{folder}/artifacts"])
def test_artifacts_go_beside_those_of_the_default_experiment_where_they_are_in_reach(
    root: str, elsewhere: Path
) -> None:
    root = root.format(folder=elsewhere)
    SqlAlchemyStore(f"sqlite:///{elsewhere / 'mlflow.db'}", root)
    tracker = Tracker()
    assert (
        tracker.client.get_experiment(tracker.experiment_id).artifact_location
        == f"{root}/{experiment.DEFAULT_EXPERIMENT}"
    )


@pytest.mark.parametrize("uri", ["postgresql+psycopg2://host/db", "mysql://host/db"])
def test_a_database_of_several_machines_has_its_artifacts_beside_those_of_the_default_experiment(
    uri: str, elsewhere: Path
) -> None:
    SqlAlchemyStore(f"sqlite:///{elsewhere / 'mlflow.db'}", f"{elsewhere}/mlruns")  # stands for that database
    client = Tracker().client
    found = client.get_experiment(experiment.choose_experiment(client, uri, "shared"))
    assert found.artifact_location == (elsewhere / "mlruns" / "shared").as_uri()
    at_server = client.get_experiment(experiment.choose_experiment(client, "http://127.0.0.1:1", "asked"))
    assert at_server.artifact_location.endswith(f"/{at_server.experiment_id}")  # the server's own choice


def run_of_mlflow(tracker: Tracker, monkeypatch: pytest.MonkeyPatch, **tags: str) -> str:
    """Return a run as `mlflow run` makes it for a process, in MLflow's "Default"."""
    run_id = tracker.client.create_run("0", tags=tags).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "0")
    return str(run_id)


def test_a_run_of_mlflow_in_default_points_at_the_run_of_the_stage(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = run_of_mlflow(Tracker(), monkeypatch)
    tracker = Tracker("mine")
    with tracker.run("awq demo", "main", {}) as run:
        pass
    with tracker.run("awq demo", "main", {}):
        pass  # a second run has no other run to point from
    mine = tracker.client.get_experiment(run.info.experiment_id)
    assert mine.name == "mine" and mine.tags["mlflow.note.content"].startswith("One row is one compressed variant")
    post = tracker.client.get_run(outer)
    assert (post.info.run_name, post.info.status) == ("see awq demo", "FINISHED")
    assert f"#/experiments/{run.info.experiment_id}/runs/{run.run_id}" in post.data.tags["mlflow.note.content"]


KILLED = """
import os, signal, sys
from mlflow_compress.tracking.tracker import Tracker
tracker = Tracker()
if sys.argv[1] == "inside":
    opened = tracker.run("awq demo", "main", {})
    opened.__enter__()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["inside", "before"])
def test_where_mlflow_run_is_killed_too_the_next_command_closes_its_run(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, python: Fork, when: str
) -> None:
    """The run that points at a job ends with it, and is hidden with it; one whose job had not begun is hidden at once."""
    outer = run_of_mlflow(Tracker(), monkeypatch)
    done = python("-c", KILLED, when)
    assert done.returncode == -9, done.stderr
    monkeypatch.delenv("MLFLOW_RUN_ID")
    tracker = Tracker()
    post = tracker.client.get_run(outer)
    assert post.info.status == "KILLED"
    assert post.info.lifecycle_stage == ("active" if when == "inside" else "deleted")
    if when == "inside":
        assert post.info.run_name == "see awq demo"
        [main] = tracker.find_unfinished("main")
        tracker.drop_killed([main])  # as the same job does where it ends well
        assert {tracker.client.get_run(one).info.lifecycle_stage for one in (main, outer)} == {"deleted"}


def test_the_run_of_mlflow_fails_with_the_run_of_the_stage_or_its_refused_parameters(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = run_of_mlflow(Tracker(), monkeypatch)
    tracker = Tracker()
    with pytest.raises(RuntimeError), tracker.run("awq demo", "main", {}):
        raise RuntimeError("broken")
    assert tracker.client.get_run(outer).info.status == "FAILED"
    outer = run_of_mlflow(Tracker(), monkeypatch)
    tracker = Tracker()
    tracker.reject(RuntimeError("refused"))
    assert tracker.client.get_run(outer).info.status == "FAILED"


def test_a_stage_of_the_main_run_stays_where_the_main_run_put_it(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = run_of_mlflow(Tracker(), monkeypatch, stage="evaluate")
    with Tracker().run("evaluate demo", "evaluate", {}) as run:
        assert run.run_id == child


def test_baselines_and_promotions_stay_out_of_the_list_of_variants(elsewhere: Path) -> None:
    tracker = Tracker("mine")
    names = {}
    for stage in ("main", "baseline", "promote"):
        with tracker.run(stage, stage, {}, own=False) as run:
            names[stage] = tracker.client.get_experiment(run.info.experiment_id).name
    assert names["main"] == "mine"
    assert names["baseline"] == names["promote"] == f"mine{experiment.BESIDE}"
    assert [run.info.run_id for run in tracker.find_finished("promote")] == [run.run_id]
    with Tracker(names["promote"]).run("again", "promote", {}) as again:
        assert again.info.experiment_id == run.info.experiment_id


def test_an_experiment_that_is_named_is_taken_and_a_new_one_lies_beside_the_store(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "/team/it's ours")
    tracker = Tracker()
    assert tracker.client.get_experiment(tracker.experiment_id).name == "/team/it's ours"
    assert log_something(tracker).is_relative_to(elsewhere)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", tracker.experiment_id)
    assert Tracker().experiment_id == tracker.experiment_id != "0"


MAKE = """
import sys
from mlflow.tracking import MlflowClient
from mlflow_compress.tracking.experiment import create_database
create_database(sys.argv[1])
print(MlflowClient(sys.argv[1]).get_experiment("0").artifact_location)
"""


@pytest.mark.ci
@pytest.mark.slow  # four processes that import MLflow
def test_processes_that_start_together_make_one_database(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAKE, f"sqlite:///{tmp_path / 'new' / 'mlflow.db'}"]
    started = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate()[0].strip() for process in started]
    assert [process.returncode for process in started] == [0] * 4
    assert set(said) == {f"{tmp_path}/new/mlruns/0"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mlflow.db"]


@pytest.mark.slow  # eight processes that import MLflow
def test_several_mlflow_runs_start_together_on_a_store_that_resume_has_made(tmp_path: Path) -> None:
    environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}"}
    make = [sys.executable, "-m", "mlflow_compress", "resume", "--dry_run", "true"]
    subprocess.run(make, cwd=tmp_path, env=environment, check=True)  # as docs/how-to/tracking-server.md says
    command = [sys.executable, "-m", "mlflow", "run", str(Path(__file__).parents[2]), "--env-manager", "local"]
    options = ["-e", "resume", "-P", "dry_run=true"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen([*command, *options], cwd=tmp_path, env=environment, **pipes) for _ in range(3)]
    said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0] * 3, said


@pytest.mark.slow
@pytest.mark.skipif(postgres_folder() is None, reason="PostgreSQL is not installed (apt install postgresql)")
@pytest.mark.skipif(importlib.util.find_spec("psycopg2") is None, reason="needs the extra postgresql")
def test_processes_that_start_together_make_the_tables_of_postgresql_once(tmp_path: Path) -> None:
    with postgres() as uri:
        command = [sys.executable, "-c", MAKE, uri]
        started = [
            subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(4)
        ]
        said = [process.communicate() for process in started]
        assert [process.returncode for process in started] == [0] * 4, said
        assert len({location for location, _ in said}) == 1


def test_what_a_killed_process_has_left_is_made_again(tmp_path: Path, empty_store: Path) -> None:
    (tmp_path / ".mlflow.db.creating").write_text("half a database")
    (tmp_path / ".mlflow.db.creating-journal").write_text("of it")
    create_database(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as made, closing(sqlite3.connect(empty_store)) as whole:
        version = "SELECT version_num FROM alembic_version"
        assert made.execute(version).fetchall() == whole.execute(version).fetchall()


def test_a_database_that_another_program_makes_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mlflow.db"
    path.touch()

    def write(statement: str) -> None:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(statement)

    clock = Clock(
        lambda: None,
        lambda: write("CREATE TABLE experiments (experiment_id INTEGER)"),
        lambda: None,
        lambda: write(
            "INSERT INTO experiments VALUES (0)"
        ),  # the default experiment is the last thing that MLflow makes
    )
    clock.drive(monkeypatch, experiment)
    create_database(f"sqlite:///{path}")
    assert len(clock.pauses) == 4


def test_a_database_that_nobody_completes_is_left_to_mlflow_after_two_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlflow.db").touch()
    clock = Clock()
    clock.drive(monkeypatch, experiment)
    create_database(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert sum(clock.pauses) == pytest.approx(120, abs=0.2)  # a pause


def test_a_file_that_is_no_database_is_left_to_mlflow_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlflow.db").write_text("this is a text file, and a long one at that" * 100)
    clock = Clock()
    clock.drive(monkeypatch, experiment)
    create_database(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert clock.pauses == []
