"""The scripts in `examples/` run as they stand, and show what they promise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(name: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.ci
def test_your_own_model_task_metric_and_judge(tmp_path: Path) -> None:
    done = run("your_own.py", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for shown in ("smaller", "quality/confidence_change", "change of confidence:", "judge/variety", "judge/similarity"):
        assert shown in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


@pytest.mark.slow
def test_the_gate_passes_the_near(tmp_path: Path) -> None:
    near = run("ci_gate.py", tmp_path, "--bits", "8", "--limit", "25", "--max-flips-pct", "10")
    assert near.returncode == 0, near.stdout + near.stderr[-3000:]


@pytest.mark.ci
def test_the_gate_stops_the_far(tmp_path: Path) -> None:
    far = run("ci_gate.py", tmp_path, "--bits", "3", "--limit", "25", "--max-flips-pct", "10")
    assert far.returncode == 1, far.stdout + far.stderr[-3000:]
    assert "flips in % (upper end)" in far.stdout
