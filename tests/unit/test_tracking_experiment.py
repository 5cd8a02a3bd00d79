"""Where artifacts lie: beside the database, whichever folder a command is started in."""

from __future__ import annotations

from pathlib import Path

import mlflow
import pytest
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from mlflow_compress.tracking import experiment
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.tracking.views import how_to_open


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
    said = how_to_open(tracker, run.run_id).splitlines()[0]
    assert said.startswith("Artifacts:") and said.removeprefix("Artifacts:").strip().endswith(str(found.parent))
    return found


def test_a_new_store_has_its_artifacts_beside_it(elsewhere: Path) -> None:
    assert log_something(Tracker()).is_relative_to(elsewhere)
    assert list(Path.cwd().iterdir()) == []


def test_a_store_that_mlflow_made_from_another_folder_gets_an_experiment_beside_it(elsewhere: Path) -> None:
    SqlAlchemyStore(f"sqlite:///{elsewhere / 'mlflow.db'}", "./mlruns")  # as MLflow does, in this folder
    first, second = Tracker(), Tracker()
    assert first.experiment_id == second.experiment_id
    assert first.client.get_experiment(first.experiment_id).name == experiment.NAME
    assert log_something(first).is_relative_to(elsewhere)
    assert list(Path.cwd().iterdir()) == []


def test_artifacts_behind_a_server_are_not_written_to_without_it(elsewhere: Path) -> None:
    SqlAlchemyStore(f"sqlite:///{elsewhere / 'mlflow.db'}", "mlflow-artifacts:/")
    assert log_something(Tracker()).is_relative_to(elsewhere)


@pytest.mark.parametrize("root", ["s3://bucket/mlflow", "{folder}/artifacts"])
def test_a_default_experiment_in_reach_stays_the_default(root: str, elsewhere: Path) -> None:
    SqlAlchemyStore(f"sqlite:///{elsewhere / 'mlflow.db'}", root.format(folder=elsewhere))
    assert Tracker().experiment_id == "0"


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
