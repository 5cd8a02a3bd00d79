"""Fixtures shared by all tests: a real MLflow store in a temporary folder."""

import gc
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Workers that share the cores would spend most of their time waiting for each other's threads. torch reads it when it is
# loaded, and so do the processes that tests start.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # as the command line sets it
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # also in the processes that tests start: it would ask another host
gc.set_threshold(50_000)  # to look for garbage among what is imported took 7 of 18 seconds

import hypothesis
import mlflow
import pytest
from mlflow.store.db import utils as db_utils
from mlflow.tracking import MlflowClient, fluent
from sqlalchemy import Engine, event

from mlflow_compress.lifetime import raise_on_signals
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.warm_python import WarmPython

if TYPE_CHECKING:
    from mlflow_compress.models.loading import LoadedModel

# The same examples everywhere; `pytest --hypothesis-profile=default` draws others, to look for more. Without a deadline:
# a test of arithmetic must not fail on a busy machine.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
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
# Of MLflow and of ours, as each test finds them.
_MLFLOW_VARIABLES = {
    **{name: value for name, value in os.environ.items() if "MLFLOW_" in name},
    "MLFLOW_TRACKING_URI": "no-store-is-named://",
}


def pytest_sessionstart(session: pytest.Session) -> None:
    _BEFORE.update(leftovers(CHECKOUT))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what is marked for CI as slow: CI runs the other tests anyway."""
    if item.get_closest_marker("ci"):
        item.add_marker("slow")


_MODULES_OUT = [0]  # how many modules were imported when their objects were taken out of garbage collections


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep a million objects of modules and tests out of every garbage collection, each of which takes half a second."""
    gc.freeze()
    _MODULES_OUT[0] = len(sys.modules)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Do so again after a file whose tests have imported a library."""
    if (nextitem is None or nextitem.path != item.path) and len(sys.modules) > _MODULES_OUT[0] + 100:
        gc.collect()
        gc.freeze()
        _MODULES_OUT[0] = len(sys.modules)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session when its tests left something in the checkout; with several workers the first process tells."""
    gained = sorted(leftovers(CHECKOUT) - _BEFORE)
    if gained and not hasattr(session.config, "workerinput"):
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        names = ", ".join(str(path.relative_to(CHECKOUT)) for path in gained[:5])
        reporter.write_line("")
        reporter.write_line(f"ERROR: the tests left {len(gained)} entries in the checkout: {names}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


Fork = Callable[..., subprocess.CompletedProcess[str]]


@contextmanager
def forks(*modules: str) -> Iterator[Fork]:
    """Yield what runs `python *arguments` as `subprocess.run` does, in forks of a process that has imported `modules`."""
    with WarmPython(modules) as warm, tempfile.TemporaryDirectory() as scratch:

        def run(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
            if arguments[0] == "-c":
                script = Path(scratch, "code.py")
                script.write_text(arguments[1])
                arguments = (str(script), *arguments[2:])
            with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
                files, known = (out.fileno(), err.fileno()), {**os.environ, **environment}
                code = warm.run(arguments, environment=known, folder=cwd or Path.cwd(), output=files)
                return subprocess.CompletedProcess(
                    arguments, code, *(file.seek(0) or file.read() for file in (out, err))
                )

        run.warm = warm  # type: ignore[attr-defined]
        yield run


@pytest.fixture(scope="session")
def python() -> Iterator[Fork]:
    """Run Python without the seconds that libraries take to be imported; our own modules are imported anew."""
    from mlflow_compress.compression import pipeline

    with forks("mlflow", "mlflow.store.tracking.sqlalchemy_store", "numba", *pipeline._OF_EVERY_CHECK) as run:
        yield run


@contextmanager
def forked_checks(python: Fork) -> Iterator[None]:
    """Within this block, what is compressed is reloaded in forks of that process, also by other threads."""
    from mlflow_compress.compression import pipeline

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "_python", ContextVar("of the tests", default=python.warm))  # type: ignore[attr-defined]
        yield


@pytest.fixture(name="forked_checks")
def forked_checks_of_a_test(python: Fork) -> Iterator[None]:
    """Reload what a test compresses in forks: a new process would import torch for seconds, each time."""
    with forked_checks(python):
        yield


@pytest.fixture(scope="session")
def light_python() -> Iterator[Fork]:
    """Run Python that has imported our command line, and what most commands import before they check parameters."""
    with forks("mlflow_compress.cli", "pyarrow", "safetensors.numpy") as run:
        yield run


@pytest.fixture(scope="session")
def entry_points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for PYTHONPATH with this checkout's entry points: what is installed may be of another commit."""
    folder = tmp_path_factory.mktemp("metadata")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True)
    return folder


@pytest.fixture
def command_signals() -> Iterator[None]:
    """Handle signals as a command does. An earlier test may have used up the first one, after which none is heard."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    raise_on_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@event.listens_for(Engine, "connect")
def no_waiting_for_the_disk(connection: Any, _: Any) -> None:
    """Let SQLite hand its pages to the system and go on: no test is about a power cut."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous = OFF")


@pytest.fixture(scope="session", autouse=True)
def tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let a new SQLite database get its tables by a copy of the first one's: MLflow's migrations take a second."""
    first, make = tmp_path_factory.mktemp("tables") / "mlflow.db", db_utils._initialize_tables

    def copied(engine: Any) -> None:
        there = first.exists() and engine.dialect.name == "sqlite"
        if not there:
            make(engine)
        if engine.dialect.name == "sqlite":
            with closing(engine.raw_connection()) as ours, closing(sqlite3.connect(first)) as theirs:
                source, target = (theirs, ours.driver_connection) if there else (ours.driver_connection, theirs)
                source.backup(target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(db_utils, "_initialize_tables", copied)
        # MLflow reads all its migrations to find the last one, each time that a store is opened: 24 ms.
        patch.setattr(db_utils, "_get_latest_schema_revision", cache(db_utils._get_latest_schema_revision))
        yield


def forget_stores() -> None:
    """Take back what a test has set of MLflow. Without a word about the store, MLflow's calls fail."""
    mlflow.set_tracking_uri(None)
    mlflow.set_registry_uri(None)
    fluent._active_experiment_id = None
    for kept in (fluent._active_run_stack, fluent._last_active_run_id, fluent._last_logged_model_id):
        kept.reset()
    fluent._ACTIVE_MODEL_CONTEXT.reset()
    for name in [name for name in os.environ if "MLFLOW_" in name and name not in _MLFLOW_VARIABLES]:
        del os.environ[name]
    os.environ.update(_MLFLOW_VARIABLES)


@pytest.fixture(autouse=True)
def own_store() -> Iterator[None]:
    """Let no test read the store of an earlier one, nor that of a fixture which it does not name."""
    forget_stores()
    yield
    forget_stores()


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
    # When it made the tables, MLflow wrote an absolute location into them, below the working folder of that moment.
    here = (tmp_path / "mlartifacts").as_uri()
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection, connection:
        connection.execute("UPDATE experiments SET artifact_location = ? || '/' || experiment_id", [here])
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
def short_windows(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let windows of a corpus have 64 tokens, an eighth of what they have."""
    from mlflow_compress.commands.evaluate import baseline, outputs

    for module in (baseline, outputs):
        monkeypatch.setattr(module, "WINDOW", 64)
    return 64


@pytest.fixture
def no_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reload what was compressed in this process."""
    from mlflow_compress.compression import pipeline
    from tests.compress_models import check_here

    monkeypatch.setattr(pipeline, "reload_in_fresh_process", check_here)


@pytest.fixture(scope="module")
def loaded() -> "LoadedModel":
    """Return the demo in single precision on the CPU."""
    from mlflow_compress import demo
    from mlflow_compress.models.loading import LoadConfig, load_model

    return load_model(LoadConfig(path=str(demo.MODEL_DIR), dtype="float32", device="cpu"))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Hugging Face's libraries stay offline."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
