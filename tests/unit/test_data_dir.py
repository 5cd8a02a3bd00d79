"""Data sets in a local folder: the rows that `datasets` gives, from files that are each read once."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import httpx
import huggingface_hub
import pyarrow as pa
import pytest
import yaml
from huggingface_hub import constants
from pyarrow import parquet

from mlflow_compress.errors import DataError
from mlflow_compress.items.named.hub_choice import MMLU, SUBJECTS
from mlflow_compress.items.sources import data_dir
from mlflow_compress.items.sources.data_dir import file_of, load_split
from mlflow_compress.items.suite import load_suite
from mlflow_compress.items.task import TaskSettings
from tests.task_files import hub_set

NAME = "org/set"


def rows(first: int, n: int = 3) -> list[dict[str, Any]]:
    return [
        {"question": f"Q{first + i}, the 1st?", "choices": ["a", "b\u2028c"], "answer": i, "day": "2024-01-02"}
        for i in range(n)
    ]


def folder_with(folder: Path, configs: list[dict[str, Any]]) -> str:
    """Return a data_dir with one data set: lines and Parquet, one split of two files."""
    there = folder / NAME
    (there / "one").mkdir(parents=True)
    for number, name in enumerate(("one/test-0.jsonl", "one/test-1.jsonl", "one/dev.jsonl", "test.jsonl")):
        lines = (json.dumps(row, ensure_ascii=False) for row in rows(10 * number))
        (there / name).write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    parquet.write_table(pa.Table.from_pylist(rows(90)), there / "one" / "validation.parquet")
    (there / "README.md").write_text(f"---\nlicense: mit\n{yaml.safe_dump({'configs': configs})}---\n# A set\n")
    return str(folder)


def splits(**files: Any) -> list[dict[str, Any]]:
    return [{"split": split, "path": path} for split, path in files.items()]


ONE = {"config_name": "one", "data_files": splits(test="one/test-*.jsonl", dev=["one/dev.jsonl"])}
OTHER = {"config_name": "other", "data_files": splits(test="test.jsonl")}
TABLE = {"config_name": "table", "data_files": splits(validation="one/validation.parquet")}


@pytest.mark.parametrize(
    ("configs", "config", "split", "ours"),
    [
        ([ONE], "one", "test", True),
        ([ONE], "one", "dev", True),
        ([ONE], None, "test", True),
        ([ONE, OTHER], "other", "test", True),
        ([TABLE], "table", "validation", True),
        ([ONE, {**OTHER, "default": True}], None, "test", True),
        ([{**OTHER, "config_name": "default"}], None, "test", True),
        ([{"config_name": "one", "data_files": "one/dev.jsonl"}], "one", "train", False),
    ],
)
def test_the_rows_are_those_of_the_library(
    configs: list[dict[str, Any]], config: str | None, split: str, ours: bool, tmp_path: Path
) -> None:
    folder = folder_with(tmp_path, configs)
    there = tmp_path / NAME
    if configs == [TABLE]:  # the library reads all files of a set in one way
        for path in there.rglob("*.jsonl"):
            path.unlink()
    assert bool(data_dir._files_of(there, config, split)) == ours
    found = load_split(NAME, config, split, data_dir=folder, task="mine")
    wanted = datasets.load_dataset(str(there), name=config, split=split, cache_dir=str(tmp_path / "cache"))
    assert found.column_names == wanted.column_names
    assert [{**row, "day": str(row["day"])[:10]} for row in found] == [
        {**row, "day": str(row["day"])[:10]} for row in wanted
    ]


@pytest.mark.parametrize(
    "head",
    [
        "configs: 3",
        "configs: [one]",
        "configs: [{data_files: [{split: test, path: 3}]}]",
        "configs: [{config_name: one, data_files: [{split: test, path: [../x.jsonl]}]}]",
        "configs: [",
    ],
)
def test_a_card_that_names_no_files_is_left_to_the_library(head: str, tmp_path: Path) -> None:
    folder_with(tmp_path, [ONE])
    (tmp_path / NAME / "README.md").write_text(f"---\n{head}\n---\n")
    assert data_dir._files_of(tmp_path / NAME, None, "test") == []


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    folder, path = folder_with(tmp_path, [ONE]), tmp_path / NAME / "one" / "dev.jsonl"
    before = load_split(NAME, "one", "dev", data_dir=folder, task="mine")["question"][:]
    path.write_text(path.read_text().replace("Q2", "R2"))
    after = load_split(NAME, "one", "dev", data_dir=folder, task="mine")["question"][:]
    assert [question.replace("Q2", "R2") for question in before] == after != before


def test_columns_that_only_some_rows_have_are_there(tmp_path: Path) -> None:
    folder, path = folder_with(tmp_path, [ONE]), tmp_path / NAME / "one" / "dev.jsonl"
    path.write_text('{"a": 1}\n{"a": 2, "b": "x"}\n')
    assert list(load_split(NAME, "one", "dev", data_dir=folder, task="mine")) == [
        {"a": 1, "b": None},
        {"a": 2, "b": "x"},
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"a": 1}\n["b"]\n', "line 2: not a JSON object"),
        ('{"a": 1}\nnull\n', "line 2: not a JSON object"),
        ('{"a": ' + "[" * 100_000 + "\n", "line 1: .*nested too deeply"),
        ('{"a": 1, "a": 2}\n', "line 1: .*has the name 'a' twice"),
        ('{"a": 1}\n{"a": "x"}\n', "dev.jsonl cannot be read"),
        ("\n", "The file is empty"),
    ],
)
def test_a_bad_line_is_named(content: str, said: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, [ONE])
    (tmp_path / NAME / "one" / "dev.jsonl").write_text(content)
    with pytest.raises(DataError, match=said):
        load_split(NAME, "one", "dev", data_dir=folder, task="mine")


N = {"dev": 5, "test": 3}


def test_a_suite_of_57_subjects_opens_each_file_once(tmp_path: Path) -> None:
    there, row = tmp_path / MMLU, {"choices": list("wxyz"), "answer": 1}
    hub_set(
        tmp_path,
        MMLU,
        {
            subject: {
                split: [{**row, "question": f"{subject} {split} {i}?"} for i in range(n)] for split, n in N.items()
            }
            for subject in SUBJECTS
        },
    )
    opened: Counter[str] = Counter()
    watching = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and str(arguments[0]).startswith(str(there)):
            opened[Path(arguments[0]).relative_to(there).as_posix()] += 1

    sys.addaudithook(watch)  # it cannot be taken away
    suite = load_suite("mmlu_lettered", model="m", settings=TaskSettings(data_dir=str(tmp_path)))
    watching = False
    assert len(suite.tasks[0].items) == 57 * 3
    assert opened == dict.fromkeys(["README.md", *(f"{s}/{split}-00000-of-00001.jsonl" for s in SUBJECTS for split in N)], 1)  # fmt: skip


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries would ask six times, and wait in between. What they need is then said to be missing."""
    asked = []

    def away(*_: object, **__: object) -> None:
        asked.append(constants.HF_HUB_OFFLINE)
        raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", away)
    for read in (
        lambda: load_split("nobody/nothing", None, "test", data_dir="", task="sums"),
        lambda: file_of("nobody/nothing", "a.csv", data_dir="", task="sums"),
    ):
        with pytest.raises(DataError, match=r"cannot be fetched .the hub does not answer: Name or service not known"):
            read()
    assert asked == [False, False] and constants.HF_HUB_OFFLINE is False
