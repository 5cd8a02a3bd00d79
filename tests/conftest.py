"""Fixtures shared by all tests: a real MLflow store in a temporary folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

# Workers that share the cores would spend most of their time waiting for each other's threads. torch reads it when it is
# loaded, and so do the processes that tests start.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

import mlflow
import pytest
from mlflow.tracking import MlflowClient

from mlflow_compress.tracking.store import Tracker


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an SQLite tracking database without runs: making the tables takes seconds, copying them does not."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def workdir(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a fresh working directory with an empty tracking store of its own, as a new user has it."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    for variable in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID", "OPENAI_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    mlflow.set_tracking_uri(uri)
    return tmp_path


@pytest.fixture
def tracker(workdir: Path) -> Tracker:
    """Return a connection to that store."""
    return Tracker()
