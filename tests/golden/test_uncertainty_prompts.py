"""The uncertainty benchmark's prompts, byte for byte.

Provenance: SHA-256 (first 16 digits) of what `format_base_prompt`, `format_shared_prompt` and `format_task_prompt` of
smartyfh/LLM-Uncertainty-Bench (commit 5d189dc, generate_logits.py with prompt.py) return for the made-up questions below.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from mlflow_compress.items.suite import load_suite
from mlflow_compress.items.task import TaskSettings

PUBLISHED = {
    ("QA", 0, "base"): "fd2b6d91bf85811d",
    ("QA", 0, "shared"): "d19929f979222fe0",
    ("QA", 0, "task"): "b3715d10a61589a6",
    ("QA", 3, "base"): "e872c7b4c8bf810b",
    ("QA", 3, "shared"): "e33d8e80f4679980",
    ("QA", 3, "task"): "e9bd363ad783a3e0",
    ("RC", 0, "base"): "98f608e681faf9d2",
    ("RC", 0, "shared"): "c8cd597894a76157",
    ("RC", 0, "task"): "f938e04cc2bf2a64",
    ("RC", 3, "base"): "3cdb9bb71a4ac41e",
    ("RC", 3, "shared"): "e10103e7957d5a5f",
    ("RC", 3, "task"): "ab21052deb245873",
    ("CI", 0, "base"): "98f608e681faf9d2",
    ("CI", 0, "shared"): "c8cd597894a76157",
    ("CI", 0, "task"): "96ce4e85224ab647",
    ("CI", 3, "base"): "3cdb9bb71a4ac41e",
    ("CI", 3, "shared"): "e10103e7957d5a5f",
    ("CI", 3, "task"): "216da757aa2b4b00",
    ("DRS", 0, "base"): "1509e0b2630daf54",
    ("DRS", 0, "shared"): "7e3bb26a02fa0098",
    ("DRS", 0, "task"): "4f401561d81fe8ff",
    ("DRS", 3, "base"): "2d50a17c2e68e80d",
    ("DRS", 3, "shared"): "ffd7f2c001773b66",
    ("DRS", 3, "task"): "67f098f4fc33d61e",
    ("DS", 0, "base"): "58a35904b4aded6b",
    ("DS", 0, "shared"): "226e11d6831522a6",
    ("DS", 0, "task"): "a88158f970f4bd3b",
    ("DS", 3, "base"): "c2e926c8df53eccb",
    ("DS", 3, "shared"): "6398caa980d1ef00",
    ("DS", 3, "task"): "609a0e2d3f8d3fed",
}


def row(kind: str, number: int, split: str) -> dict[str, Any]:
    made = {
        "id": f"{split}{number}",
        "category": "anything",
        "kind": kind,
        "split": split,
        "question": f"Which one is number {number} ?",
        "choices": [f"{number}{word} " for word in ("one", "two", "three", "four")],
        "answer": number % 4,
    }
    return made if kind == "QA" else {**made, "context": f" First line {number}.\nSecond line."}


@pytest.mark.parametrize(("kind", "shots", "method"), PUBLISHED)
def test_prompts_are_the_published_ones(tmp_path: Path, kind: str, shots: int, method: str) -> None:
    rows = [row(kind, number, "dev") for number in range(3)] + [row(kind, 9, "test")]
    path = tmp_path / "made.jsonl"
    path.write_text("".join(json.dumps(made) + "\n" for made in rows))
    settings = TaskSettings(
        num_fewshot=shots, num_shuffles=0, prompt_style=method if method != "shared" else "base,shared"
    )
    six = load_suite(str(path), model="m", settings=settings).tasks[-1]
    assert six.name == f"made_{method}_six"
    [prompt] = {request.context for request in six.requests}
    assert hashlib.sha256(prompt.encode()).hexdigest()[:16] == PUBLISHED[kind, shots, method]
