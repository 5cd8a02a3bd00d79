"""Fixtures shared by all tests: a real MLflow store in a temporary folder."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

# Workers that share the cores would spend most of their time waiting for each other's threads. torch reads it when it is
# loaded, and so do the processes that tests start.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # as the command line sets it

import hypothesis
import mlflow
import pytest
from mlflow.tracking import MlflowClient

from mlflow_compress.lifetime import raise_on_signals
from mlflow_compress.tracking.tracker import Tracker

if TYPE_CHECKING:
    from mlflow_compress.models.loading import LoadedModel

# The same examples everywhere; `pytest --hypothesis-profile=default` draws others, to look for more.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.load_profile("same")

CHECKOUT = Path(__file__).resolve().parents[1]
# What runs leave in the folder that they are started in. Tests have stores and folders of their own.
LEFTOVERS = frozenset({"mlruns", "mlartifacts", "mlflow.db", "compressed", ".mlflow_compress"})


def leftovers(checkout: Path) -> set[Path]:
    """Return what runs have left in a checkout and its project folders: files, and folders two levels deep.

    The levels show that a test added to a folder which a developer's own runs had made before.
    """
    folders = [checkout, *(path for path in (checkout / "projects").glob("*") if path.is_dir())]
    tops = [folder / name for folder in folders for name in LEFTOVERS if (folder / name).exists()]
    return {path for top in tops for path in (top, *top.glob("*"), *top.glob("*/*"))}


_BEFORE: set[Path] = set()


def pytest_sessionstart(session: pytest.Session) -> None:
    _BEFORE.update(leftovers(CHECKOUT))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session when its tests left something in the checkout; with several workers the first process tells."""
    gained = sorted(leftovers(CHECKOUT) - _BEFORE)
    if gained and not hasattr(session.config, "workerinput"):
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        names = ", ".join(str(path.relative_to(CHECKOUT)) for path in gained[:5])
        reporter.write_line("")
        reporter.write_line(f"ERROR: the tests left {len(gained)} entries in the checkout: {names}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def move_artifacts(database: Path, folder: Path) -> None:
    """Let every experiment of a copied SQLite store put its artifacts into `folder`.

    MLflow writes an absolute location into the database when it makes the tables, below the working folder of that moment.
    """
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE experiments SET artifact_location = ? || '/' || experiment_id", [folder.as_uri()])


@pytest.fixture
def command_signals() -> Iterator[None]:
    """Handle signals as a command does. An earlier test may have used up the first one, after which none is heard."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    raise_on_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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
    move_artifacts(tmp_path / "mlflow.db", tmp_path / "mlartifacts")
    monkeypatch.chdir(tmp_path)
    for variable in (
        "MLFLOW_RUN_ID",
        "MLFLOW_EXPERIMENT_NAME",
        "MLFLOW_EXPERIMENT_ID",
        "MLFLOW_COMPRESS_STARTED_IN",
        "OPENAI_API_KEY",
    ):
        monkeypatch.delenv(variable, raising=False)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    mlflow.set_tracking_uri(uri)
    return tmp_path


@pytest.fixture
def tracker(workdir: Path) -> Tracker:
    """Return a connection to that store."""
    return Tracker()


@pytest.fixture
def no_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reload what was compressed in this process."""
    from mlflow_compress.compression import pipeline
    from tests.compress_models import check_here

    monkeypatch.setattr(pipeline, "reload_in_fresh_process", check_here)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """Return the demo in single precision on the CPU."""
    from mlflow_compress import demo
    from mlflow_compress.models.loading import LoadConfig, load_model

    return load_model(LoadConfig(path=str(demo.MODEL_DIR), dtype="float32", device="cpu"))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Hugging Face's libraries stay offline."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
