"""The file of a SQLite store: complete when it is there, made once, whoever starts and whoever is killed."""

from __future__ import annotations

import importlib.util
import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.local_servers import postgres, postgres_folder
from mlflow_compress.tracking import experiment
from mlflow_compress.tracking.experiment import create_database

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
    uri = f"sqlite:///{tmp_path / 'new' / 'mlflow.db'}"
    command = [sys.executable, "-c", MAKE, uri]
    started = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate()[0].strip() for process in started]
    assert [process.returncode for process in started] == [0] * 4
    assert set(said) == {f"{tmp_path}/new/mlruns/0"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mlflow.db"]


@pytest.mark.slow  # eight processes that import MLflow
def test_several_mlflow_runs_start_together_on_a_store_that_resume_has_made(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    environment = {**os.environ, "MLFLOW_TRACKING_URI": uri}
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


def test_a_database_that_another_program_makes_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    path.touch()
    waited = threading.Thread(target=create_database, args=(f"sqlite:///{path}",))
    waited.start()
    waited.join(0.5)
    assert waited.is_alive()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE experiments (experiment_id INTEGER)")
    waited.join(0.5)
    assert waited.is_alive()  # the default experiment is the last thing that MLflow makes
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO experiments VALUES (0)")
    waited.join(10)
    assert not waited.is_alive()


def test_a_file_that_is_no_database_is_left_to_mlflow_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "_LONGEST_MIGRATION_S", 60.0)
    (tmp_path / "mlflow.db").write_text("this is a text file, and a long one at that" * 100)
    began = time.monotonic()
    create_database(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert time.monotonic() - began < 5
