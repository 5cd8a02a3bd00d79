"""The benchmark of one GPU: its questions, what has to be carried to a machine, and the whole of it on a tiny shape."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_scale import SUBJECTS, made_questions, wheels
from mlflow_compress.items.suite import load_suite
from mlflow_compress.items.task import TaskSettings

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_scale.py"


def test_made_questions_are_lettered_ones_of_as_many_subjects_and_lengths_as_mmlus(tmp_path: Path) -> None:
    file = made_questions(tmp_path / "made.jsonl", 2)
    suite = load_suite(str(file), model="", settings=TaskSettings(limit=1))
    assert len(suite.items) == 2 * SUBJECTS  # one of the two of each subject, and once more with E and F
    prompts = suite.items.column("prompt")
    # Six questions of 60 words and four options of 8 words each, of 5 letters: about 3,300 characters.
    assert 2000 < sum(map(len, prompts)) / len(prompts) < 5000


def test_wheels_are_what_neither_torch_nor_transformers_bring_nor_the_machine_has(tmp_path: Path) -> None:
    needed = [line.split("==")[0] for line in wheels("")]
    assert {"mlflow", "lm-eval", "pyarrow"} <= set(needed)
    assert not {"torch", "transformers", "tokenizers", "numpy", "mlflow-compress"} & set(needed)
    frozen = tmp_path / "there.txt"
    frozen.write_text("lm_eval @ file:///lm_eval\nPyArrow==23.0\n\n")
    assert set(needed) - {line.split("==")[0] for line in wheels(str(frozen))} == {"lm-eval", "pyarrow"}


@pytest.mark.slow
def test_without_a_gpu_it_tries_itself() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--tiny"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert found["path"] == "packed" and found["tokens"] < found["tokens_naive"] and found["times_the_harness"] > 0
    assert "| passes |" in done.stdout and "Not measured" not in done.stdout
