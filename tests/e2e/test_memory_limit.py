"""A limit on memory that is too small for the model: one clear error, no run left open, no half a checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from mlflow_compress.compression import compress_model
from tests.compress_models import make_llama

pytestmark = [pytest.mark.slow, pytest.mark.ci]

# The libraries are in memory, and have what they need. The model is a file of 180 MB, and 350 MB in float32.
LIMITED = """
import resource, sys
from pathlib import Path
import transformers.models.llama.modeling_llama
from mlflow_compress import cli
from mlflow_compress.commands.evaluate import run
from mlflow_compress.commands.quantize import run
from mlflow_compress.compression.methods import casts
pages = int(Path("/proc/self/statm").read_text().split()[0])
most = pages * resource.getpagesize() + 1_000_000 * int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (most, most))
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    size = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 3}
    return make_llama(tmp_path_factory.mktemp("large") / "model", **size)


def limited(folder: Path, megabytes: int, *arguments: str) -> str:
    """Run a command that may take so much memory more, and return its error."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LIMITED, str(megabytes), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == "" and "Traceback" not in done.stderr, done.stderr[-3000:]
    [line] = [line for line in done.stderr.splitlines() if line.startswith("mlflow-compress: ")]
    return line


def statuses() -> list[str]:
    client = MlflowClient()
    return [run.info.status for run in client.search_runs([e.experiment_id for e in client.search_experiments()])]


def test_quantize(model: Path, workdir: Path) -> None:
    said = limited(workdir, 200, "quantize", "--model", str(model), "--method", "fp16", "--output_dir", "out")
    assert "There is not enough memory" in said and "--device balanced" in said
    assert statuses() == ["FAILED"] and [path for path in workdir.glob("out/*") if path.is_dir()] == []


def test_evaluate(model: Path, workdir: Path, no_fresh_process: None) -> None:
    compress_model(str(model), "fp16", None, [], workdir / "variant")
    (workdir / "text.txt").write_text("The river is old and the bridge is new. " * 120)
    arguments = ["--model", str(model), "--checkpoint", "variant", "--tasks", "text.txt"]
    said = limited(workdir, 200, "evaluate", *arguments)
    assert "There is not enough memory" in said and "--dtype bfloat16" in said
    assert set(statuses()) == {"FAILED"}
