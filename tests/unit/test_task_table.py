"""Named tasks: the table is complete, current in the README, and printed without loading anything heavy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlflow_compress.tasks.base import TaskSettings
from mlflow_compress.tasks.catalogue import TASKS
from mlflow_compress.tasks.harness.catalogue import manager
from mlflow_compress.tasks.harness.names import defined_names, is_mentioned
from mlflow_compress.tasks.suite import load_suite
from mlflow_compress.tasks.table import as_text, rows

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

from write_task_table import README, with_table  # noqa: E402


def test_the_readme_holds_the_current_table() -> None:
    assert README.read_text() == with_table(README.read_text()), "run tools/write_task_table.py"


def test_every_task_says_where_it_comes_from_and_can_be_told_from_the_others() -> None:
    assert all(row[1] and row[2] and row[3] and row[5] for row in rows())
    assert len({row[-1] for row in rows()}) == len(rows())
    assert all(re.fullmatch("[0-9a-f]{12}", row[-1]) for row in rows())


def test_a_task_is_a_group_or_can_be_built() -> None:
    for name, task in TASKS.items():
        assert (task.build is None) == bool(task.members), name
        assert all(member.partition("@")[0] in TASKS.names() for member in task.members)


def test_the_demo_s_counts_are_right() -> None:
    tasks = {task.name: len(task.items) for task in load_suite("demo", model="demo", settings=TaskSettings()).tasks}
    said = [int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", TASKS.get("demo").items)]
    assert said == [tasks[f"demo_{name}"] for name in ("choice", "cloze", "lastword", "exact")]
    assert tasks["demo_choice_six"] == tasks["demo_choice"]


@pytest.mark.parametrize("name", ["mmlu", "piqa", "arc_easy", "lambada_openai", "gsm8k", "triviaqa"])
def test_names_are_the_harness_s_own(name: str) -> None:
    assert is_mentioned(name) and name in defined_names()
    assert not is_mentioned("surely_not_a_task")


def test_printing_the_table_imports_neither_torch_nor_the_harness() -> None:
    code = "import sys; from mlflow_compress.cli import main; main(['tasks']); print({'torch', 'lm_eval', 'mlflow'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == as_text() + "\nset()\n"


@pytest.mark.slow
def test_the_folders_of_our_names_hold_what_the_whole_collection_holds() -> None:
    whole = manager()
    for folder, name in [
        ("arc", "arc_easy"),
        ("mmlu/default", "mmlu"),
        ("lambada", "lambada_openai"),
        ("gsm8k", "gsm8k"),
    ]:
        assert manager((folder,)).task_index[name].yaml_path == whole.task_index[name].yaml_path
    found = whole.task_index["mmlu_stem_tasks"].tags
    assert manager(("mmlu/default",)).task_index["mmlu_stem_tasks"].tags == found
