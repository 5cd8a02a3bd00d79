"""PostgreSQL behind a tracking server: pipelines of two machines evaluate the baseline once, and all finish."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.local_servers import postgres_folder

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(postgres_folder() is None, reason="PostgreSQL is not installed (apt install postgresql)"),
    pytest.mark.skipif(importlib.util.find_spec("psycopg2") is None, reason="needs the extra postgresql"),
]


@pytest.mark.parametrize("store", ["server", "postgresql"])
def test_pipelines_of_two_machines_share_one_baseline(store: str, tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/eight_pipelines.py", "--store", store, "--pipelines", "2", "--machines", "2"]
    done = subprocess.run([*command, "--keep", tmp_path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 finished, 1 baseline(s), 0 left RUNNING" in done.stdout
    waited = [log for log in tmp_path.glob("pipeline-*.log") if "waiting for it" in log.read_text()]
    assert len(waited) == 1  # the machine that asked second
