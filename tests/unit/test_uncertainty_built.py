"""The uncertainty benchmark's task types, drawn again from their sources: real MMLU, made-up rows of the others."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlflow_compress.errors import DataError
from mlflow_compress.items.named import hub_choice, uncertainty
from mlflow_compress.items.named import uncertainty as uncertainty_built
from mlflow_compress.items.named.hub_choice import CATEGORIES
from tests.harness_reference import HUB
from tests.shared_data import needs_shared
from tests.unit.test_named_lettered import cosmos, halueval, hub_set, tasks

pytestmark = pytest.mark.usefixtures("no_network")

QA = uncertainty_built.MEMBERS["uncertainty_built_qa"]


def test_mmlu_s_categories_are_the_harness_s() -> None:
    import lm_eval

    folder = Path(lm_eval.__file__).parent / "tasks" / "mmlu" / "default"
    tags = {}
    for path in folder.glob("mmlu_*.yaml"):
        leaf = yaml.safe_load(path.read_text())
        tags[leaf["dataset_name"]] = leaf["tag"].removeprefix("mmlu_").removesuffix("_tasks").replace("_", " ")
    ours = {subject: category.lower() for category, subjects in CATEGORIES.items() for subject in subjects}
    assert ours == tags


def quarters(rows: list[dict[str, Any]], subject_of: dict[str, set[str]]) -> Counter[str]:
    """How many rows each category has; of a question that several ask, each of theirs."""
    return Counter(place for row in rows for place in subject_of[f"{row['question']} {row['choices']}"])


def by_question(folder: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for category, subjects in CATEGORIES.items():
        for row in (
            row for subject in subjects for row in hub_choice.subject_rows(subject, str(folder), task="mmlu_lettered")
        ):
            found.setdefault(f"{row['question']} {row['choices']}", set()).add(category)
    return found


def test_mmlu_gives_a_quarter_of_each_category(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncertainty_built, "DRAWN", 40)
    for split in ("dev", "test"):
        for subject in hub_choice.SUBJECTS:
            path = tmp_path / "cais" / "mmlu" / split / f"{subject}_{split}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{split} {subject} {i}?,a,b,c,d,{'ABCD'[i]}\n" for i in range(3)))
    rows = uncertainty_built.built_rows("uncertainty_built_qa", QA, str(tmp_path))
    assert len(rows) == 40 and Counter(row["split"] for row in rows) == {"test": 35, "dev": 5}
    assert [int(row["id"]) for row in rows if row["split"] == "dev"] == [1, 3, 5, 7, 9]
    assert quarters(rows, by_question(tmp_path)) == dict.fromkeys(CATEGORIES, 10)
    assert all(row["question"].startswith("test ") for row in rows)
    assert rows == uncertainty_built.built_rows("uncertainty_built_qa", QA, str(tmp_path))


@needs_shared
@pytest.mark.slow
def test_real_mmlu_has_enough_questions_in_every_category(monkeypatch: pytest.MonkeyPatch) -> None:
    once = cache(hub_choice.subject_rows)
    monkeypatch.setattr(hub_choice, "subject_rows", lambda subject, folder, **_: once(subject, folder))
    rows = uncertainty_built.built_rows("uncertainty_built_qa", QA, str(HUB))
    assert Counter(row["split"] for row in rows) == {"test": 9_995, "dev": 5}
    category = by_question(HUB)
    shared = sum(len(category[f"{row['question']} {row['choices']}"]) - 1 for row in rows)  # asked in two categories
    assert sum(abs(n - 2_500) for n in quarters(rows, category).values()) == shared < 20


def hellaswag(number: int) -> dict[str, Any]:
    endings = [f"{word} {number}." for word in ("zero", "one", "two", "three")]
    return {
        "activity_label": "Baking",
        "ctx_a": f"Flour {number}.",
        "ctx_b": "",
        "endings": endings,
        "label": str(number % 4),
    }


def test_the_others_are_drawn_from_every_split_with_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncertainty_built, "DRAWN", 30)
    from datasets import Dataset

    for split, numbers in {"train": range(25), "validation": range(25, 40)}.items():
        place = tmp_path / "allenai" / "cosmos_qa" / "default" / split / "0000.parquet"
        place.parent.mkdir(parents=True)
        Dataset.from_list([cosmos(i) for i in numbers]).to_parquet(place)
    swag = {"train": [hellaswag(i) for i in range(12)], "validation": [hellaswag(i) for i in range(12, 20)]}
    hub_set(tmp_path, "Rowan/hellaswag", "default", swag)
    for name, n, source in (("rc", 30, 40), ("ci", 20, 20)):
        found = {task.name: task for task in tasks(f"uncertainty_built_{name}", tmp_path, num_fewshot=0)}
        six = found[f"uncertainty_built_{name}_task_six"]
        assert set(found) == {f"uncertainty_built_{name}_base"} | {
            f"uncertainty_built_{name}_{style}_six" for style in ("base", "shared", "task")
        }
        assert len(six.items) == n - 5
        context = six.requests[0].context
        assert context.count("Answer:") == 6 and context.endswith("E. I don't know\nF. None of the above\nAnswer:")
        assert len({r.context for r in six.requests}) == n - 5 <= source


@pytest.mark.parametrize(("kind", "name", "shots"), [("dialogue", "drs", 3), ("summarization", "ds", 1)])
def test_halueval_keeps_both_texts(tmp_path: Path, kind: str, name: str, shots: int) -> None:
    hub_set(tmp_path, "pminervini/HaluEval", kind, {"data": [halueval(kind, i) for i in range(40)]})
    six = tasks(f"uncertainty_built_{name}", tmp_path, num_fewshot=0)[-1]
    assert len(six.items) == 35 and six.requests[0].context.count("Answer:") == shots + 1
    for row in six.items.table.to_pylist():
        number = row["options"][row["gold"]].removeprefix("right ")
        assert f"wrong {number}" in row["options"] and row["options"][4:] == ["I don't know", "None of the above"]


def test_too_few_and_broken_records_are_refused(tmp_path: Path) -> None:
    hub_set(tmp_path, "Rowan/hellaswag", "default", {"train": [hellaswag(0)], "validation": [hellaswag(1)]})
    with pytest.raises(DataError, match=r"uncertainty_built_ci: the source holds too few questions.*Got: '?2"):
        tasks("uncertainty_built_ci", tmp_path)
    broken = [{**hellaswag(i), "label": ""} for i in range(12)]
    hub_set(tmp_path / "b", "Rowan/hellaswag", "default", {"train": broken, "validation": broken})
    with pytest.raises(DataError, match=r"uncertainty_built_ci: a record is not in the data set's layout"):
        tasks("uncertainty_built_ci", tmp_path / "b")
    with pytest.raises(DataError, match=r"'uncertainty_built_qa' needs the data set"):
        tasks("uncertainty_built_qa", tmp_path)


def test_the_group_holds_the_five() -> None:
    kinds = [published.kind for published in uncertainty_built.MEMBERS.values()]
    assert kinds == [published.kind for published in uncertainty.FILES.values()] == ["QA", "RC", "CI", "DRS", "DS"]
