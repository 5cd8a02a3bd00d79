"""A disk that is really full, and one that is read-only: one clear error, nothing half-written, and a way on."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

pytestmark = pytest.mark.slow


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 4 MiB: room for a database, not for a checkpoint."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=False, text=True)
    if mounted.returncode:
        pytest.skip("only root may mount a small file system here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def quantize(store: Path, out: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{store / 'mlflow.db'}"}
    command = [sys.executable, "-m", "mlflow_compress", "quantize", "--method", "rtn", "--output_dir", str(out)]
    return subprocess.run(command, cwd=store, env=environment, capture_output=True, text=True, check=False)


def statuses(store: Path) -> list[str]:
    client = MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
    return [run.info.status for run in client.search_runs([e.experiment_id for e in client.search_experiments()])]


def test_a_full_disk(disk: Path) -> None:
    refused = quantize(disk, disk / "out")
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    assert "No space left on device" in refused.stderr and "Free disk space" in refused.stderr
    assert [path for path in (disk / "out").iterdir() if path.is_dir()] == []  # nor half a checkpoint
    assert statuses(disk) == ["FAILED"]
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    again = quantize(disk, disk / "out")
    assert again.returncode == 0, again.stderr
    assert sorted(statuses(disk)) == ["FAILED", "FINISHED"]


def test_a_read_only_folder(disk: Path, workdir: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for store, out in ((workdir, disk / "out"), (disk, workdir / "out")):
        refused = quantize(store, out)
        assert refused.returncode in (1, 2) and "Traceback" not in refused.stderr
        [line] = [line for line in refused.stderr.splitlines() if line.startswith("mlflow-compress: ")]
        assert "Read-only file system" in line or "unable to open database" in line
    assert "RUNNING" not in statuses(workdir)
