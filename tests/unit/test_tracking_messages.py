"""What a command says where the environment names what the store does not have, and how it prints commands and paths."""

import logging
import shlex
import shutil
import sys
from pathlib import Path

import mlflow
import pytest

from mlflow_compress import cli
from mlflow_compress.engines.vllm import vllm_process
from mlflow_compress.errors import MissingDependencyError, TrackingError
from mlflow_compress.tracking import experiment
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.tracking.views import how_to_open


def use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a new store the one that commands take; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    mlflow.set_tracking_uri(uri)
    return folder


@pytest.fixture
def store(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use(workdir / "store", monkeypatch)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MLFLOW_RUN_ID", "0123456789abcdef0123456789abcdef"),
        ("MLFLOW_RUN_ID", "../x y"),
        ("MLFLOW_EXPERIMENT_ID", "777"),
        ("MLFLOW_EXPERIMENT_ID", "no number"),
    ],
)
def test_a_stale_variable_is_named_with_its_value(
    variable: str, value: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(TrackingError) as raised:
        Tracker()
    said = str(raised.value)
    assert f"variable {variable} names" in said and repr(value) in said and f"unset {variable}" in said
    assert "MLFLOW_TRACKING_URI" not in said


def test_beside_a_stale_run_another_error_is_told_as_ever(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0123456789abcdef0123456789abcdef")
    assert cli.main(["quantize", "--method", "nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err


def test_an_empty_variable_is_none(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.setenv(variable, "")
    tracker = Tracker()
    assert tracker.client.get_experiment(tracker.experiment_id).name == experiment.DEFAULT_EXPERIMENT
    with tracker.run("x", "main", {}):
        pass


def test_a_deleted_run_is_named_with_the_command_that_restores_it(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker()
    run_id = tracker.client.create_run(tracker.experiment_id).info.run_id
    tracker.client.delete_run(run_id)
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    with pytest.raises(TrackingError, match=f"MLFLOW_RUN_ID.*deleted.*mlflow runs restore --run-id {run_id}"):
        Tracker()


@pytest.mark.parametrize("how", ["default", "parameter", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID", "beside"])
def test_a_deleted_experiment_is_named_with_the_command_that_restores_it(
    how: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "auto" if how == "default" else "my own"
    tracker = Tracker(name)
    with tracker.run("b", "baseline", {}, own=False) as run:
        beside = str(run.info.experiment_id)
    gone = beside if how == "beside" else tracker.experiment_id
    tracker.client.delete_experiment(gone)
    if how.startswith("MLFLOW"):
        monkeypatch.setenv(how, gone if how.endswith("ID") else "my own")
        name = "auto"

    def command() -> None:
        with Tracker(name).run("b", "baseline", {}, own=False):
            pass

    with pytest.raises(TrackingError) as raised:
        command()
    shown = {"default": experiment.DEFAULT_EXPERIMENT, "beside": f"my own{experiment.BESIDE}"}.get(how, "my own")
    assert f"The experiment {shown!r} was deleted" in str(raised.value)
    restore = f"mlflow experiments restore --experiment-id {gone}"
    assert f"{restore};" in str(raised.value)
    from click.testing import CliRunner
    from mlflow.cli import cli as mlflow_cli

    assert CliRunner().invoke(mlflow_cli, shlex.split(restore)[1:]).exit_code == 0
    command()


@pytest.mark.parametrize("folder", ["plain", "a b", "it's", "$HOME; x", 'quo"ted'])
def test_printed_commands_are_one_word_for_each_argument(
    folder: str, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = use(workdir / folder, monkeypatch)
    tracker = Tracker()
    with tracker.run("x", "main", {}) as run:
        pass
    lines = how_to_open(tracker.client, tracker.uri, run.run_id).splitlines()
    [start] = [line.removeprefix("Start the UI:").strip() for line in lines if line.startswith("Start the UI:")]
    assert shlex.split(start)[-2:] == ["--backend-store-uri", f"sqlite:///{store / 'mlflow.db'}"]


def test_no_password_of_a_database_is_printed(store: Path) -> None:
    tracker = Tracker()
    with tracker.run("x", "main", {}) as run:
        pass
    lines = how_to_open(tracker.client, "postgresql://ann:secret@db.here:5432/runs", run.run_id)
    assert "secret" not in lines and "ann" not in lines
    assert "--backend-store-uri postgresql://db.here:5432/runs  (with the user and password of the store)" in lines


def test_the_command_that_mends_an_environment_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, python = tmp_path / "worker.py", tmp_path / "my envs" / "python"
    worker.write_text("import sys; sys.exit('RuntimeError: operator torchvision::nms does not exist')")
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(vllm_process, "VLLM_WORKER", worker)
    with pytest.raises(MissingDependencyError) as raised:
        vllm_process.VllmProcess(str(python), {"model": "any"})
    words = shlex.split(raised.value.fix.partition("Run: ")[2])
    assert words[:4] == [str(python), "-m", "pip", "uninstall"]


def test_a_copied_store_says_once_where_its_artifacts_go(
    store: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> list[str]:
        found = [record.getMessage() for record in caplog.records if "copied" in record.getMessage()]
        caplog.clear()
        return found

    def log() -> Path:
        with Tracker().run("x", "main", {}) as run:
            run.log_text("text", f"{run.run_id}.txt")
        [found] = workdir.rglob(f"{run.run_id}.txt")
        return found

    caplog.set_level(logging.WARNING)
    assert log().is_relative_to(store) and said() == []
    shutil.copytree(store, workdir / "new place")
    new = use(workdir / "new place", monkeypatch)
    assert log().is_relative_to(store)
    [message] = said()
    beside, used = new / "mlruns" / experiment.DEFAULT_EXPERIMENT, store / "mlruns" / experiment.DEFAULT_EXPERIMENT
    assert f"{experiment.DEFAULT_EXPERIMENT!r} still go to {used}, not to {beside}" in message
    link = shlex.split(message[message.index("ln -s") :])
    assert link == ["ln", "-s", str(beside), str(used)]
    log()
    assert said() == []  # once in a process
    # What it advises works: another experiment, and a link in the old place.
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "other")
    assert log().is_relative_to(new) and said() == []
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    shutil.rmtree(used)
    Path(link[3]).symlink_to(link[2])
    experiment._tell_copied_store.cache_clear()
    log()
    assert said() == [] and len(list(beside.rglob("*.txt"))) == 2


def test_a_store_whose_artifacts_were_put_elsewhere_on_purpose_says_nothing(
    store: Path, workdir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    (workdir / "disk").mkdir()
    made = SqlAlchemyStore(f"sqlite:///{store / 'mlflow.db'}", str(workdir / "disk"))
    made.create_experiment(experiment.DEFAULT_EXPERIMENT, artifact_location=(workdir / "disk" / "mine").as_uri())
    with Tracker().run("x", "main", {}) as run:
        run.log_text("text", "a.txt")
    assert len(list((workdir / "disk" / "mine").rglob("a.txt"))) == 1
    assert not [record for record in caplog.records if "copied" in record.getMessage()]
