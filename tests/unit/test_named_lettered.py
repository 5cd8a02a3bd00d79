"""Data sets as lettered questions: real ARC, and made-up rows in the true layout of the others."""

import csv
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlflow_compress.errors import DataError, UnsupportedError
from mlflow_compress.items.named import halueval_lettered, hub_choice, uncertainty
from mlflow_compress.items.named import uncertainty as uncertainty_built
from mlflow_compress.items.named.hub_choice import CATEGORIES
from mlflow_compress.items.prompt_style import ABOUT
from mlflow_compress.items.suite import load_suite
from mlflow_compress.items.task import Task, TaskSettings
from tests.harness_reference import HUB
from tests.shared_data import needs_shared
from tests.task_files import hub_set

pytestmark = pytest.mark.usefixtures("no_network")

NUMBERS = ("zero", "one", "two", "three", "four")


def tasks(name: str, folder: Path, **settings: Any) -> tuple[Task, ...]:
    asked = TaskSettings(**{"num_fewshot": 2, "num_shuffles": 0, "data_dir": str(folder), **settings})
    return load_suite(name, model="m", settings=asked).tasks


def labelled(number: int, labels: str, key: str, question: str = "question") -> dict[str, Any]:
    choices = {"text": [f"{NUMBERS[i]} of {number}" for i in range(len(labels))], "label": list(labels)}
    return {"id": f"x{number}", question: f"Which is {number}?", "choices": choices, "answerKey": key}


def shown(task: Task) -> list[tuple[str, list[str], int]]:
    """Question, options and gold of every item."""
    columns = ("question", "options", "gold")
    return [tuple(row[name] for name in columns) for row in task.items.table.to_pylist()]  # type: ignore[misc]


@needs_shared
@pytest.mark.parametrize(
    ("name", "config", "n"), [("arc_challenge", "ARC-Challenge", 1172), ("arc_easy", "ARC-Easy", 2376)]
)
def test_real_arc_keeps_its_options_and_answers(name: str, config: str, n: int) -> None:
    plain, six = tasks(f"{name}_lettered@3", HUB)
    lines = (HUB / "allenai" / "ai2_arc" / config / "test.jsonl").read_text().splitlines()
    raw = [json.loads(line) for line in lines]
    right = [row["choices"]["text"][row["choices"]["label"].index(row["answerKey"])] for row in raw]
    assert len(plain.items) == len(raw) == n
    assert [(q, options[gold]) for q, options, gold in shown(plain)] == [
        (row["question"], text) for row, text in zip(raw, right, strict=True)
    ]
    sizes = [len(row["choices"]["text"]) for row in raw]
    assert set(sizes) == {3, 4, 5} and len(six.items) == sizes.count(4)
    assert plain.requests[0].context.count("Answer:") == 4
    assert len(plain.requests) == sum(sizes)


@needs_shared
def test_real_arc_in_every_order_with_its_examples_shuffled() -> None:
    settings = {"all_orders": 3, "num_shuffles": 1, "limit": 50}
    plain, _, every = tasks("arc_easy_lettered", HUB, **settings, shuffle_fewshot=True)
    assert (every.name, every.family, len(every.items)) == ("arc_easy_lettered_orders", "lettered_orders", 3)
    assert len({(r.item_id, r.permutation) for r in every.requests}) == 3 * 24
    fixed = tasks("arc_easy_lettered", HUB, **settings)[0]
    pairs = list(zip(plain.requests, fixed.requests, strict=True))
    assert any(a.context != b.context for a, b in pairs)
    assert all(a.permutation for a, b in pairs if a.context != b.context)


def test_numeric_keys_and_three_options_in_arc_s_layout(tmp_path: Path) -> None:
    rows = [labelled(0, "1234", "3"), labelled(1, "ABC", "B")]
    hub_set(tmp_path, "allenai/ai2_arc", {"ARC-Easy": {"train": rows, "test": rows}})
    plain, six = tasks("arc_easy_lettered", tmp_path)
    assert [(len(options), gold) for _, options, gold in shown(plain)] == [(4, 2), (3, 1)]
    assert "\nC. two of 0\nD. three of 0\nAnswer: C\n\nWhich is 1?\nA. zero of 1\n" in plain.requests[0].context
    assert six.items.column("item_id").tolist() == ["test-0"]
    hub_set(tmp_path / "b", "allenai/ai2_arc", {"ARC-Easy": {"train": rows, "test": [labelled(0, "ABC", "D")]}})
    with pytest.raises(DataError, match=r"allenai/ai2_arc, ARC-Easy, test, row 0: 'answerKey' is not the label.*'D'"):
        tasks("arc_easy_lettered", tmp_path / "b")


def test_commonsense_qa_has_five_options_and_no_six(tmp_path: Path) -> None:
    rows = [{**labelled(i, "ABCDE", "ABCDE"[i]), "question_concept": "x"} for i in range(5)]
    hub_set(tmp_path, "tau/commonsense_qa", {"default": {"train": rows, "validation": rows}})
    [plain] = tasks("commonsense_qa_lettered", tmp_path)
    assert [(len(options), gold) for _, options, gold in shown(plain)] == [(5, i) for i in range(5)]
    assert [r.continuation for r in plain.requests[:5]] == [" A", " B", " C", " D", " E"]
    with pytest.raises(UnsupportedError, match=r"All orders of 5 options are too many \(120\)"):
        tasks("commonsense_qa_lettered", tmp_path, all_orders=2)
    hub_set(
        tmp_path / "b", "tau/commonsense_qa", {"default": {"train": rows, "validation": [{**rows[0], "answerKey": ""}]}}
    )
    with pytest.raises(DataError, match=r"tau/commonsense_qa, validation, row 0: 'answerKey' is not the label"):
        tasks("commonsense_qa_lettered", tmp_path / "b")


def test_openbookqa_calls_its_question_a_stem(tmp_path: Path) -> None:
    rows = [labelled(i, "ABCD", "D", "question_stem") for i in range(3)]
    hub_set(tmp_path, "allenai/openbookqa", {"main": {"train": rows, "test": rows}})
    plain, six = tasks("openbookqa_lettered", tmp_path)
    assert shown(plain)[2] == ("Which is 2?", ["zero of 2", "one of 2", "two of 2", "three of 2"], 3)
    assert len(six.items) == 3


def test_auto_round_in_the_same_process_changes_no_path(tmp_path: Path) -> None:
    """Its import puts a function in place of `datasets.load_dataset` that rewrites paths which hold "openbookqa"."""
    pytest.importorskip("auto_round")
    test_openbookqa_calls_its_question_a_stem(tmp_path)


def test_hellaswag_shows_the_beginning_without_marks(tmp_path: Path) -> None:
    row = {
        "ind": 4,
        "activity_label": "Baking bread",
        "ctx_a": "[header] How to bake [title] Take flour.",
        "ctx_b": "the baker",
        "ctx": "[header] How to bake [title] Take flour. the baker",
        "endings": ["sleeps. [step] Then wakes.", "kneads it.", "sings.", "runs."],
        "source_id": "s",
        "split": "val",
        "split_type": "indomain",
        "label": "1",
    }
    hub_set(tmp_path, "Rowan/hellaswag", {"default": {"train": [row] * 2, "validation": [row]}})
    plain, _ = tasks("hellaswag_lettered", tmp_path, num_fewshot=0, prompt_style="base")
    assert plain.requests[0].context == (
        "Context: Baking bread: How to bake. Take flour. The baker\n"
        "Question: Which of these is the most likely continuation?\nChoices:\n"
        "A. sleeps. Then wakes.\nB. kneads it.\nC. sings.\nD. runs.\nAnswer:"
    )
    assert plain.items.column("gold").tolist() == [1]
    hub_set(tmp_path / "b", "Rowan/hellaswag", {"default": {"train": [row] * 2, "validation": [{**row, "label": ""}]}})
    with pytest.raises(DataError, match=r"Rowan/hellaswag, validation, row 0: not in the data set's layout"):
        tasks("hellaswag_lettered", tmp_path / "b")


def cosmos(number: int) -> dict[str, Any]:
    answers = {f"answer{i}": f"{NUMBERS[i]} of {number}" for i in range(4)}
    return {"id": f"c{number}", "context": "It rained.", "question": f"Why {number}?", **answers, "label": number % 4}


def test_cosmos_qa_from_the_hub_s_parquet_revision_and_the_original_csv(tmp_path: Path) -> None:
    rows = [cosmos(i) for i in range(3)]
    for split, file in {"train": "train", "validation": "valid"}.items():
        from datasets import Dataset

        parquet = tmp_path / "a" / "allenai" / "cosmos_qa" / "default" / split / "0000.parquet"
        parquet.parent.mkdir(parents=True)
        Dataset.from_list(rows).to_parquet(parquet)
        original = tmp_path / "b" / "allenai" / "cosmos_qa" / f"{file}.csv"
        original.parent.mkdir(parents=True, exist_ok=True)
        with original.open("w", newline="") as sink:
            writer = csv.DictWriter(sink, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    found = [tasks("cosmos_qa_lettered", tmp_path / name, prompt_style="base") for name in "ab"]
    assert [t.content_hash() for t in found[0]] == [t.content_hash() for t in found[1]]
    plain, six = found[0]
    assert shown(plain)[2] == ("It rained.\nWhy 2?", ["zero of 2", "one of 2", "two of 2", "three of 2"], 2)
    assert plain.requests[0].context.endswith(
        "Context: It rained.\nQuestion: Why 0?\nChoices:\nA. zero of 0\nB. one of 0\nC. two of 0\nD. three of 0\nAnswer:"
    )
    assert len(six.items) == 3


def halueval(kind: str, number: int) -> dict[str, Any]:
    right, wrong = f"right {number}", f"wrong {number}"
    if kind == "summarization":
        return {"document": f"Document {number}.", "right_summary": right, "hallucinated_summary": wrong}
    history = f"[Human]: Hello {number}. [Assistant]: Yes?"
    return {"knowledge": "k", "dialogue_history": history, "right_response": right, "hallucinated_response": wrong}


@pytest.mark.parametrize(
    ("kind", "begin"), [("dialogue", "Dialogue: [Human]: Hello"), ("summarization", "Document: Document")]
)
def test_halueval_s_options_are_both_texts_and_two_of_others(tmp_path: Path, kind: str, begin: str) -> None:
    rows = [halueval(kind, i) for i in range(60)]
    hub_set(tmp_path / "hub", "pminervini/HaluEval", {kind: {"data": rows}})
    original = tmp_path / "original" / "pminervini" / "HaluEval" / "data" / f"{kind}_data.json"
    original.parent.mkdir(parents=True)
    original.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [
        tasks(f"halueval_{kind}_lettered", tmp_path / place, prompt_style="base", seed=i)
        for i, place in enumerate(("hub", "original"))
    ]
    assert [t.content_hash() for t in found[0]] == [t.content_hash() for t in found[1]]  # whatever the seed
    plain, six = found[0]
    assert plain.requests[0].context.startswith(begin)
    assert len(plain.items) == len(six.items) == 60 - halueval_lettered.EXAMPLES
    for number, (_, options, gold) in enumerate(shown(plain), start=halueval_lettered.EXAMPLES):
        assert len(set(options)) == 4 and options[gold] == f"right {number}" and f"wrong {number}" in options
    assert {gold for _, _, gold in shown(plain)} == {0, 1, 2, 3}
    original.write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(DataError, match=r"fewer than 10 different texts\. Got: '1 rows'"):
        tasks(f"halueval_{kind}_lettered", tmp_path / "original")


@pytest.mark.parametrize(
    ("name", "dataset"),
    [
        ("arc_easy_lettered", "allenai/ai2_arc"),
        ("commonsense_qa_lettered", "tau/commonsense_qa"),
        ("openbookqa_lettered", "allenai/openbookqa"),
        ("hellaswag_lettered", "Rowan/hellaswag"),
        ("cosmos_qa_lettered", "allenai/cosmos_qa --revision refs/convert/parquet"),
        ("halueval_dialogue_lettered", "pminervini/HaluEval"),
        ("uncertainty_qa", "ErikYip/LLM-Uncertainty-Bench mmlu_10k.json"),
    ],
)
def test_a_missing_data_set_is_named_with_the_command_that_fetches_it(tmp_path: Path, name: str, dataset: str) -> None:
    with pytest.raises(DataError) as caught:
        tasks(name, tmp_path)
    place = f"{tmp_path}/{dataset.partition(' ')[0]}"
    assert f"hf download --repo-type dataset {dataset} --local-dir {place} ; then give data_dir={tmp_path}" in str(
        caught.value
    )
    assert f"{name!r} needs the data set" in str(caught.value)


def published(name: str, n: int = 20) -> list[dict[str, Any]]:
    """Made-up questions in the layout of the published files."""
    file = uncertainty.PUBLISHED_FILES[name]
    rows: list[dict[str, Any]] = []
    for number in range(n):
        choices = dict(zip("ABCD", [f"{word} of {number}" for word in NUMBERS], strict=False))
        row = {"source": file.source, "question": f"Question {number}?", "answer": "ABCD"[number % 4], "id": number}
        row["choices"] = {**choices, "E": "I don't know", "F": "None of the above"}
        rows.append(row if file.kind == "QA" else {**row, "context": f"Passage {number}."})
    return rows


def publish(folder: Path, name: str, content: str | None = None) -> None:
    place = folder / uncertainty.UNCERTAINTY_DATASET / "data"
    place.mkdir(parents=True, exist_ok=True)
    (place / uncertainty.PUBLISHED_FILES[name].file).write_text(content or json.dumps(published(name)))


def test_the_uncertainty_group_asks_the_published_files_in_three_prompts(tmp_path: Path) -> None:
    for name in uncertainty.PUBLISHED_FILES:
        publish(tmp_path, name)
    found = {task.name: task for task in tasks("uncertainty", tmp_path, num_fewshot=0)}  # the files' own examples
    assert len(found) == 5 * (1 + 3)
    for (name, file), shots in zip(uncertainty.PUBLISHED_FILES.items(), (5, 5, 5, 3, 1), strict=True):
        assert found[f"{name}_base"].family == "lettered"
        for style in ("base", "shared", "task"):
            six = found[f"{name}_{style}_six"]
            assert six.items.column("item_id").tolist() == [f"{i:05d}" for i in range(20) if i not in (1, 3, 5, 7, 9)]
            context = six.requests[0].context
            assert [context.count(f"Question {i}?") for i in file.examples] == [1] * shots
            assert context.count("Answer:") == shots + 1 and context.endswith("F. None of the above\nAnswer:")
            assert (ABOUT[file.kind] in context) == (style == "task")
    qa = found["uncertainty_qa_base_six"].requests[0].context
    assert qa.startswith(
        "Question: Question 1?\nChoices:\nA. zero of 1\nB. one of 1\nC. two of 1\nD. three of 1\n"
        "E. I don't know\nF. None of the above\nAnswer: B\nQuestion: Question 3?\n"
    )
    assert "Dialogue: Passage 9.\nQuestion: Question 9?\n" in found["uncertainty_drs_base_six"].requests[0].context


def test_the_uncertainty_tasks_take_other_prompts_and_fewer_examples(tmp_path: Path) -> None:
    publish(tmp_path, "uncertainty_rc")
    names = [task.name for task in tasks("uncertainty_rc@0", tmp_path, prompt_style="task")]
    assert names == ["uncertainty_rc_task", "uncertainty_rc_task_six"]
    zero = tasks("uncertainty_rc@0", tmp_path, prompt_style="task")[1].requests[0].context
    assert zero.startswith("The following is a multiple-choice question about reading comprehension. You should")
    publish(tmp_path, "uncertainty_ds")
    with pytest.raises(DataError, match=r"too few few-shot examples.*Allowed: 2 or more\. Got: 1"):
        tasks("uncertainty_ds@2", tmp_path)


def test_numbers_among_the_published_options_are_shown_as_text(tmp_path: Path) -> None:
    rows = published("uncertainty_qa")
    rows[0]["choices"]["B"] = 2.5
    publish(tmp_path, "uncertainty_qa", json.dumps(rows))
    six = tasks("uncertainty_qa", tmp_path)[1]
    assert shown(six)[0][1] == ["zero of 0", "2.5", "two of 0", "three of 0", "I don't know", "None of the above"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"answer": "E"}, r"question 2: Not six options A to F of which one of A to D is right"),
        ({"choices": dict.fromkeys("ABCD", "x")}, r"question 2: Not six options A to F"),
        ({"source": "HellaSwag"}, r"question 2: The question is of another source\. Allowed: MMLU\. Got: 'HellaSwag'"),
        ({"choices": None}, r"question 2: not in the data set's layout"),
    ],
)
def test_files_that_are_not_the_published_ones_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    rows = published("uncertainty_qa")
    rows[2] |= change
    publish(tmp_path, "uncertainty_qa", json.dumps(rows))
    with pytest.raises(DataError, match=r"mmlu_10k\.json, " + words):
        tasks("uncertainty_qa", tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1,", r"mmlu_10k\.json: not JSON"),
        ("[]", r"not a list of questions"),
        ('{"a": 1}', r"not a list of questions"),
        (" ", "is empty"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path: Path, content: str, words: str) -> None:
    publish(tmp_path, "uncertainty_qa", content)
    with pytest.raises(DataError, match=words):
        tasks("uncertainty_qa", tmp_path)
    publish(tmp_path, "uncertainty_rc")
    with pytest.raises(DataError, match=r"has no hellaswag_10k\.json(.|\n)*has no halu_summarization\.json"):
        tasks("uncertainty", tmp_path)


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
    monkeypatch.setattr(uncertainty_built, "_DRAWN", 40)
    for split in ("dev", "test"):
        for subject in hub_choice.SUBJECTS:
            path = tmp_path / "cais" / "mmlu" / split / f"{subject}_{split}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{split} {subject} {i}?,a,b,c,d,{'ABCD'[i]}\n" for i in range(3)))
    rows = uncertainty_built.built_rows(QA, "uncertainty_built_qa", str(tmp_path))
    assert len(rows) == 40 and Counter(row["split"] for row in rows) == {"test": 35, "dev": 5}
    assert [int(row["id"]) for row in rows if row["split"] == "dev"] == [1, 3, 5, 7, 9]
    assert quarters(rows, by_question(tmp_path)) == dict.fromkeys(CATEGORIES, 10)
    assert all(row["question"].startswith("test ") for row in rows)
    assert rows == uncertainty_built.built_rows(QA, "uncertainty_built_qa", str(tmp_path))


@needs_shared
@pytest.mark.slow
def test_real_mmlu_has_enough_questions_in_every_category(monkeypatch: pytest.MonkeyPatch) -> None:
    once = cache(hub_choice.subject_rows)
    monkeypatch.setattr(hub_choice, "subject_rows", lambda subject, folder, **_: once(subject, folder))
    rows = uncertainty_built.built_rows(QA, "uncertainty_built_qa", str(HUB))
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
    monkeypatch.setattr(uncertainty_built, "_DRAWN", 30)
    from datasets import Dataset

    for split, numbers in {"train": range(25), "validation": range(25, 40)}.items():
        place = tmp_path / "allenai" / "cosmos_qa" / "default" / split / "0000.parquet"
        place.parent.mkdir(parents=True)
        Dataset.from_list([cosmos(i) for i in numbers]).to_parquet(place)
    swag = {"train": [hellaswag(i) for i in range(12)], "validation": [hellaswag(i) for i in range(12, 20)]}
    hub_set(tmp_path, "Rowan/hellaswag", {"default": swag})
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
    hub_set(tmp_path, "pminervini/HaluEval", {kind: {"data": [halueval(kind, i) for i in range(40)]}})
    six = tasks(f"uncertainty_built_{name}", tmp_path, num_fewshot=0)[-1]
    assert len(six.items) == 35 and six.requests[0].context.count("Answer:") == shots + 1
    for row in six.items.table.to_pylist():
        number = row["options"][row["gold"]].removeprefix("right ")
        assert f"wrong {number}" in row["options"] and row["options"][4:] == ["I don't know", "None of the above"]


def test_too_few_and_broken_records_are_refused(tmp_path: Path) -> None:
    hub_set(tmp_path, "Rowan/hellaswag", {"default": {"train": [hellaswag(0)], "validation": [hellaswag(1)]}})
    with pytest.raises(DataError, match=r"uncertainty_built_ci: the source holds too few questions.*Got: '?2"):
        tasks("uncertainty_built_ci", tmp_path)
    broken = [{**hellaswag(i), "label": ""} for i in range(12)]
    hub_set(tmp_path / "b", "Rowan/hellaswag", {"default": {"train": broken, "validation": broken}})
    with pytest.raises(DataError, match=r"uncertainty_built_ci: a record is not in the data set's layout"):
        tasks("uncertainty_built_ci", tmp_path / "b")
    with pytest.raises(DataError, match=r"'uncertainty_built_qa' needs the data set"):
        tasks("uncertainty_built_qa", tmp_path)


def test_the_group_holds_the_five() -> None:
    kinds = [published.kind for published in uncertainty_built.MEMBERS.values()]
    assert (
        kinds
        == [published.kind for published in uncertainty.PUBLISHED_FILES.values()]
        == ["QA", "RC", "CI", "DRS", "DS"]
    )
