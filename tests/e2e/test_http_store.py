"""A tracking server that serves artifacts: folders are downloaded once, into the cache, and nowhere else."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest

from benchmarks.local_servers import TrackingServer
from mlflow_compress.home import VARIABLE
from mlflow_compress.tracking import artifacts as downloads
from mlflow_compress.tracking.tracker import Tracker


@pytest.fixture
def server(workdir: Path) -> Iterator[str]:
    with TrackingServer(workdir, f"sqlite:///{workdir / 'mlflow.db'}") as started:
        yield started.uri


@pytest.mark.ci  # the server needs seconds to start
def test_artifacts_are_downloaded_once_and_nothing_is_left_behind(
    server: str, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = workdir / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv(VARIABLE, str(workdir / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "served")  # the Default experiment's artifacts lie in a folder
    mlflow.set_tracking_uri(server)
    monkeypatch.setattr(downloads, "_in_use", {})
    tracker = Tracker()
    (workdir / "records").mkdir()
    (workdir / "records" / "items").write_text("1")
    with tracker.run("baseline", "baseline", {}) as run:
        run.log_folder(workdir / "records", "records")
        (workdir / "records" / "items").write_text("2")
        assert (tracker.fetch(run.run_id, "records") / "items").read_text() == "1"
        run.log_folder(workdir / "records", "records")  # a run that is not finished may change
        assert (tracker.fetch(run.run_id, "records") / "items").read_text() == "2"
        unfinished = set(scratch.iterdir())
    first = tracker.fetch(run.run_id, "records")
    assert first.is_relative_to(workdir / "home" / "downloads") and (first / "items").read_text() == "2"
    called = []
    whole = mlflow.artifacts.download_artifacts
    monkeypatch.setattr(mlflow.artifacts, "download_artifacts", lambda **kw: called.append(kw) or whole(**kw))
    assert Tracker().fetch(run.run_id, "records") == first and not called
    assert set(scratch.iterdir()) == unfinished  # deleted when the process ends
