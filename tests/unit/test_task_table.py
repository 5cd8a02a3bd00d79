"""Named tasks: the table is complete, current in the documentation, and printed without loading anything heavy."""

import csv
import json
import re
import sys
from pathlib import Path

import pytest

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.items.harness_tasks import check_is_mentioned, defined_names, folder_of_task, manager
from mlflow_compress.items.named import hub_choice
from mlflow_compress.items.named_tasks import TASKS, rows
from mlflow_compress.items.suite import load_suite
from mlflow_compress.items.task import TaskSettings
from tests.conftest import Fork

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

from write_task_table import PAGE, with_table  # noqa: E402


def test_the_page_holds_the_current_table() -> None:
    assert PAGE.read_text() == with_table(PAGE.read_text()), "run tools/write_task_table.py"


def test_every_task_says_where_it_comes_from_and_can_be_told_from_the_others() -> None:
    assert all(row[1] and row[2] and row[3] and row[5] for row in rows())
    assert len({row[-1] for row in rows()}) == len(rows())
    assert all(re.fullmatch("[0-9a-f]{12}", row[-1]) for row in rows())


def test_a_task_is_a_group_or_can_be_built() -> None:
    for name, task in TASKS.items():
        assert sum(map(bool, (task.build, task.read, task.members))) == 1, name
        assert all(member.partition("@")[0] in TASKS.names() for member in task.members)


def test_the_demo_s_counts_are_right() -> None:
    tasks = {task.name: len(task.items) for task in load_suite("demo", model="demo", settings=TaskSettings()).tasks}
    said = [int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", TASKS.get("demo").items)]
    assert said == [tasks[f"demo_{name}"] for name in ("choice", "cloze", "lastword", "exact")]
    assert tasks["demo_choice_six"] == tasks["demo_choice"]


@pytest.mark.parametrize("name", ["mmlu", "piqa", "arc_easy", "lambada_openai", "gsm8k", "triviaqa"])
def test_names_are_the_harness_s_own(name: str) -> None:
    check_is_mentioned(name)
    assert name in defined_names()
    with pytest.raises(ConfigError, match="Unknown task"):
        check_is_mentioned("surely_not_a_task")


def test_printing_the_table_imports_neither_torch_nor_the_harness(light_python: Fork) -> None:
    code = "import sys; from mlflow_compress.cli import main; main(['tasks']); print({'torch', 'lm_eval', 'mlflow'} & set(sys.modules))"
    shown = light_python("-c", code).stdout.splitlines()
    names = [line for line in shown[:-1] if not line.startswith(" ")]
    assert shown[-1] == "set()" and names == [row[0] for row in rows()]


def test_mmlu_in_our_own_family_from_hub_and_original_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_choice, "SUBJECTS", ["moral_disputes"])
    hub, original = tmp_path / "hub" / "cais" / "mmlu", tmp_path / "original" / "cais" / "mmlu"
    rows = [{"question": f'Is "{i}", or not?', "choices": ["w", "x", "y", "z"], "answer": i % 4} for i in range(3)]
    (hub / "moral_disputes").mkdir(parents=True)
    files = [{"split": split, "path": f"moral_disputes/{split}.jsonl"} for split in ("dev", "test")]
    card = {"configs": [{"config_name": "moral_disputes", "data_files": files}]}
    (hub / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")
    for split in ("dev", "test"):
        (hub / "moral_disputes" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (original / split).mkdir(parents=True)
        with (original / split / f"moral_disputes_{split}.csv").open("w") as sink:
            csv.writer(sink).writerows([r["question"], *r["choices"], "ABCD"[r["answer"]]] for r in rows)
    suites = [
        load_suite("mmlu_lettered@2", model="m", settings=TaskSettings(data_dir=str(tmp_path / name), num_shuffles=1))
        for name in ("hub", "original")
    ]
    assert suites[0].hashes() == suites[1].hashes()
    plain, six = suites[0].tasks
    assert plain.requests[0].context.startswith(
        "The following are multiple choice questions (with answers) about moral disputes.\n\n"
        'Is "0", or not?\nA. w\nB. x\nC. y\nD. z\nAnswer: A\n\nIs "1", or not?\n'
    )
    assert (len(plain.requests), len(six.requests)) == (3 * 2 * 4, 3 * 6)
    (original / "test" / "moral_disputes_test.csv").write_text("a,b,c,d,e,F\n")
    with pytest.raises(DataError, match=r"moral_disputes_test\.csv, record 1: .*letter A to D"):
        load_suite("mmlu_lettered", model="m", settings=TaskSettings(data_dir=str(tmp_path / "original")))


@pytest.mark.parametrize(
    ("name", "folder"),
    [("mmlu_anatomy", "mmlu/default"), ("piqa", "piqa"), ("mmlu", None), ("ai2_arc", None), ("no_such_task", None)],
)
def test_a_single_task_is_found_without_the_whole_index(name: str, folder: str | None) -> None:
    assert folder_of_task(name) == folder
    assert folder is None or name in manager((folder,)).all_subtasks


def test_the_demo_s_tasks_do_not_wait_for_the_harness(light_python: Fork) -> None:
    code = (
        "import sys, warnings; warnings.simplefilter('error'); from mlflow_compress.items.suite import load_suite; from mlflow_compress.items.task import TaskSettings; "
        "load_suite('demo', model='demo', settings=TaskSettings()); print({'torch', 'lm_eval', 'datasets'} & set(sys.modules))"
    )
    found = light_python("-c", code)
    assert (found.stdout, found.stderr) == ("set()\n", "")


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
    for name in whole.all_subtasks[::400]:
        folder = folder_of_task(name)
        assert folder is None or manager((folder,)).task_index[name].yaml_path == whole.task_index[name].yaml_path
    found = whole.task_index["mmlu_stem_tasks"].tags
    assert manager(("mmlu/default",)).task_index["mmlu_stem_tasks"].tags == found
