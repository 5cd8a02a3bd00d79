"""Calibration text that holds evaluation items or corpus paragraphs is refused, and nothing else is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlflow_compress import demo
from mlflow_compress.config import MainConfig
from mlflow_compress.errors import DataError
from mlflow_compress.stages import main
from mlflow_compress.tasks.base import Corpus, Task, TaskSettings
from mlflow_compress.tasks.files import load_file
from mlflow_compress.tasks.overlap import CalibrationText, check_apart
from mlflow_compress.tasks.suite import load_suite

LONG = "In which of these years did the miller of the lower valley sell his last sack of flour to the baker?"
ROWS: list[dict[str, Any]] = [
    {"id": "long", "category": "c", "question": LONG, "choices": ["1850", "1900"], "answer": 0},
    {
        "id": "short",
        "category": "c",
        "question": "Who sold flour?",
        "choices": ["the miller", "the baker"],
        "answer": 0,
    },
    {"id": "tiny", "category": "c", "question": "Who?", "choices": ["me", "you"], "answer": 0},
]


@pytest.fixture
def task(tmp_path: Path) -> Task:
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return load_file(tmp_path / "q.jsonl", TaskSettings(shots=0, shuffles=0)).tasks[0]


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (LONG.upper().replace(" ", "\n"), ["long"]),
        ("... of these years did the miller of the lower valley sell his last sack, and more", ["long"]),
        ("of these years did the miller of the lower valley sell his", []),  # 12 words
        ("Who sold flour?\nA. the miller\nB. the baker\nAnswer: A", ["short"]),
        ("Who sold flour? The baker, the miller", []),  # another order
        ("Whoever sold flour the miller the bakers", []),  # parts of words
        ("Who? me you", []),
    ],
)
def test_words_in_a_row_decide(task: Task, text: str, held: list[str]) -> None:
    if not held:
        check_apart([text], [task], [])
        return
    with pytest.raises(DataError, match=f"holds {len(held)} of 3 items of task 'q'. Got: .*{held[0]}"):
        check_apart(["something else", text], [task], [])


def test_a_run_does_not_cross_two_texts(task: Task) -> None:
    half = len(LONG) // 2
    check_apart([LONG[:half], LONG[half:]], [task], [])


def test_paragraphs_of_a_corpus_count_when_they_are_long() -> None:
    paragraph = " ".join(f"word{i}" for i in range(60))
    corpus = Corpus(name="held_out", text=f"A heading\n{paragraph}\nA short line that repeats\n")
    check_apart(["A short line that repeats"], [], [corpus])
    with pytest.raises(DataError, match="1 paragraphs of the corpus 'held_out'"):
        check_apart([f"Before. {paragraph} After."], [], [corpus])


def test_main_refuses_before_anything_runs(tmp_path: Path, task: Task) -> None:
    (tmp_path / "calibration.txt").write_text(f"Some text.\n\n{LONG}\n")
    config = MainConfig(calibration=str(tmp_path / "calibration.txt"), tasks=str(tmp_path / "q.jsonl"), shots=0)
    with pytest.raises(DataError, match="calibration text holds 1 of 3 items"):
        main._check_calibration(config)
    main._check_calibration(MainConfig(tasks=str(tmp_path / "q.jsonl"), shots=0))


def test_the_readme_says_how_far_the_embedded_text_overlaps() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    said = re.search(r"shares sentences with ([\d,]+) of the demo's ([\d,]+) items", readme)
    paragraphs = (demo.DATA_DIR / "calibration.txt").read_text().split("\n\n")
    text = CalibrationText.of(paragraphs)
    tasks = [t for t in load_suite("demo", model="demo", settings=TaskSettings()).tasks if t.family != "lettered_six"]
    counted = (sum(len(text.held_items(task)) for task in tasks), sum(len(task.items) for task in tasks))
    assert said is not None and tuple(int(n.replace(",", "")) for n in said.groups()) == counted
