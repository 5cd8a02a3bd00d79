"""Problems from data sets in hub layout, and formulas that math-verify compares."""

import csv
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from mlflow_compress.commands.evaluate.own_text import places_in_chain
from mlflow_compress.errors import DataError, MissingDependencyError
from mlflow_compress.items.suite import load_suite
from mlflow_compress.items.task import Task, TaskSettings
from mlflow_compress.reasoning import agree, conclusions, read_answer, read_gold

needs_math = pytest.mark.skipif(find_spec("math_verify") is None, reason="needs the extra 'math'")

MATH = [
    {"problem": "Add the halves.", "solution": "...", "answer": r"\frac{1}{2}", "subject": "Algebra", "level": 2,
     "unique_id": "test/algebra/1.json"},
    {"problem": "Who?", "solution": "...", "answer": r"\text{Evelyn}", "subject": "Algebra", "level": 2,
     "unique_id": "test/algebra/2.json"},
]  # fmt: skip
AIME24 = [{"id": 60, "problem": "Find it.", "solution": "...", "answer": "033", "url": "u", "year": "2024"}]
AIME25 = [{"problem": "Find it.", "answer": "70", "id": "0"}]
GSM8K = [{"question": "How many?", "answer": "6 * 200 = <<6*200=1200>>1200\n#### 1,200"}]
GPQA = {
    "Record ID": "rec1", "Question": "Which one?\n", "Correct Answer": "the right one ", "Incorrect Answer 1": "w1",
    "Incorrect Answer 2": "w2", "Incorrect Answer 3": "w3", "High-level domain": "Physics", "Subdomain": "Optics",
}  # fmt: skip


def lines(folder: Path, dataset: str, file: str, rows: list[dict[str, object]], config: str = "") -> None:
    """Write a data set as on the hub: its files, and a card that names them."""
    (folder / dataset / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / dataset / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    split = "train" if "train" in file else "test"
    named = f"- config_name: {config or 'default'}\n  data_files:\n  - split: {split}\n    path: {file}\n"
    (folder / dataset / "README.md").write_text(f"---\nconfigs:\n{named}---\n")


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    lines(tmp_path, "HuggingFaceH4/MATH-500", "test.jsonl", MATH)
    lines(tmp_path, "HuggingFaceH4/aime_2024", "data/train-00000-of-00001.jsonl", AIME24)
    lines(tmp_path, "math-ai/aime25", "test.jsonl", AIME25)
    lines(tmp_path, "openai/gsm8k", "main/test-00000-of-00001.jsonl", GSM8K, config="main")
    lines(tmp_path, "Idavidrein/gpqa", "unused.jsonl", [], config="unused")
    with (tmp_path / "Idavidrein/gpqa/gpqa_diamond.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(GPQA))
        writer.writeheader()
        writer.writerow(GPQA)
    card = "---\nconfigs:\n- config_name: gpqa_diamond\n  data_files: gpqa_diamond.csv\n---\n"
    (tmp_path / "Idavidrein/gpqa/README.md").write_text(card)
    return tmp_path


def task_of(name: str, sets: Path, **settings: object) -> Task:
    [task] = load_suite(name, model="", settings=TaskSettings(data_dir=str(sets), **settings)).tasks  # type: ignore[arg-type]
    return task


@pytest.mark.parametrize(
    ("name", "question", "right", "wrong", "most"),
    [
        ("aime24", "Find it.", r"\boxed{33}", "34", 32_768),
        ("aime25", "Find it.", "The answer is 70.", "7", 32_768),
        ("gsm8k_thinking", "How many?", r"\boxed{1200}", "1,201", 8_192),
        pytest.param("math500", "Add the halves.", r"\boxed{0.5}", r"\boxed{\frac{1}{3}}", 16_384, marks=needs_math),
    ],
)
def test_a_data_set_becomes_problems(name: str, question: str, right: str, wrong: str, most: int, sets: Path) -> None:
    task = task_of(name, sets)
    assert task.family == "thinking" and task.chat and task.answering is not None
    assert (task.answering.max_new_tokens, task.answering.samples) == (most, 8)
    first = task.items.table.to_pylist()[0]
    assert first["prompt"].startswith(f"{question}\n\nThink step by step") and first["item_id"].endswith("-0")
    judge = task.answering.judge
    assert judge is not None
    for reply, grade in ((right, True), (wrong, False), ("I do not know", None)):
        assert judge({first["item_id"]: f"<think>34</think>{reply}"}) == {first["item_id"]: grade}, reply
    shorter = task_of(name, sets, thinking_max_new_tokens=100)
    assert shorter.answering is not None and shorter.answering.max_new_tokens == 100


def test_the_order_of_gpqas_answers_is_drawn_with_the_seed(sets: Path) -> None:
    seen = set()
    for seed in range(12):
        [row] = task_of("gpqa_diamond", sets, seed=seed).items.table.to_pylist()
        shown = dict(re.findall(r"\((\w)\) (.+)", row["question"]))
        assert sorted(shown.values()) == ["the right one", "w1", "w2", "w3"] and row["category"] == "Physics"
        assert shown[row["answers"][0]] == "the right one"
        seen.add(row["answers"][0])
    assert len(seen) > 1
    [row] = task_of("gpqa_diamond", sets, seed=3).items.table.to_pylist()
    assert row == task_of("gpqa_diamond", sets, seed=3).items.table.to_pylist()[0]


def test_another_layout_is_refused_with_its_row(sets: Path) -> None:
    lines(sets, "math-ai/aime25", "test.jsonl", [*AIME25, {"question": "?", "answer": "1"}])
    with pytest.raises(DataError, match=r"math-ai/aime25, test, row 1: not in the data set's layout"):
        task_of("aime25", sets)
    lines(sets, "openai/gsm8k", "main/test-00000-of-00001.jsonl", [{"question": "?", "answer": "7"}], config="main")
    with pytest.raises(DataError, match="no '####' before the number"):
        task_of("gsm8k_thinking", sets)
    lines(sets, "math-ai/aime25", "test.jsonl", [{"problem": "?", "answer": "none", "id": "0"}])
    with pytest.raises(DataError, match="cannot be read as a number"):
        task_of("aime25", sets)


def test_a_data_set_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="hf download --repo-type dataset math-ai/aime25"):
        task_of("aime25", tmp_path)


@pytest.mark.skipif(find_spec("math_verify") is not None, reason="the extra 'math' is there")
def test_formulas_need_an_extra(sets: Path) -> None:
    with pytest.raises(MissingDependencyError, match=r"pip install 'mlflow-compress\[math\]'"):
        task_of("math500", sets)


@needs_math
@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        (r"\frac{1}{2}", r"so \boxed{\frac12}", True),
        (r"\frac{1}{2}", "The answer is $0.5$.", True),
        (r"\frac{1}{2}", "The answer is 2", False),
        ("3", "$y = 7$, hence $x=3$", True),
        ("x^3+3x-6", r"\boxed{-6 + 3x + x^3}", True),
        (r"2\sqrt{13}", r"\boxed{\sqrt{52}}", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \pi/2)}", True),
        (r"(-\infty,3)", r"\boxed{x \in (-\infty, 3)}", True),
        (r"(-\infty,3)", r"\boxed{x < 3}", False),  # by default an inequality is no interval to math-verify
        (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", True),
        (r"\text{Evelyn}", r"\boxed{\text{Carla}}", False),
        ("12", r"\boxed{13}, no: \boxed{12}", True),
        ("1, 2", r"\boxed{1} and \boxed{2}", True),
        ("1, 2", r"\boxed{3}. No, $\boxed{1}$, $\boxed{2}$", True),
        ("12", "The answer is 12.", True),
        ("12", r"\boxed{1}, \boxed{2}. So the answer is 12.", True),
        ("12", "it is seven", None),
    ],
)
def test_formulas_are_compared_as_math_verify_does(gold: str, answer: str, right: bool | None) -> None:
    read = read_answer(answer, "math")
    assert (None if read is None else agree(read_gold(gold, "math"), read, "math")) == right


@needs_math
def test_a_formula_is_found_where_it_stands() -> None:
    pieces = ["<think>", "x", "</think>", "So ", r"\boxed{\frac{", "1", "}{2}}", "."]
    assert places_in_chain("q", pieces, "math", "0.5") == {"n_thought": 3, "answer_begin": 4, "answer_end": 7}


def test_what_is_boxed_may_hold_braces() -> None:
    text = r"\boxed{\text{(B)}} and \boxed{\text{A}}, then \boxed{}"
    assert [*conclusions(text, "letter")] == ["B", "A"]
    assert [*conclusions(r"\boxed{\frac{1}{2}", "number")] == []
