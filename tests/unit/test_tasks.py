"""Tasks: families from fields, prompts, permutations, limits, and errors with file and line."""

import csv
import json
import re
import sys
from dataclasses import fields, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from mlflow_compress.errors import ConfigError, DataError, UnsupportedError
from mlflow_compress.items.harness_tasks import check_is_mentioned, defined_names, folder_of_task, manager
from mlflow_compress.items.named import hub_choice
from mlflow_compress.items.named_tasks import TASKS, NamedTask, task_rows
from mlflow_compress.items.sources.instructions import find_instructions, load_instructions
from mlflow_compress.items.sources.question_files import read_jsonl
from mlflow_compress.items.suite import load_suite
from mlflow_compress.items.task import Answering, Parts, Task, TaskSettings, item_row
from mlflow_compress.items.task import request as task_request
from mlflow_compress.records import Items, Request
from tests.conftest import Fork
from tests.shared_data import SHARED, needs_shared
from tests.task_files import hub_set
from tests.task_files import write_rows as write

SETTINGS = TaskSettings(num_fewshot=1, num_shuffles=2, seed=1)


def lettered(n: int = 3, category: str = "rivers") -> list[dict[str, Any]]:
    dev = {"id": "d0", "category": category, "question": "Which?", "choices": ["w", "x", "y", "z"], "answer": 1}
    test = [
        {"id": f"q{i}", "category": category, "question": f"Q{i}?", "choices": list("abcd"), "answer": i % 4}
        for i in range(n)
    ]
    return [{**dev, "split": "dev"}, *test]


def suite(path: Path, task_rows: list[dict[str, Any]], settings: TaskSettings = SETTINGS) -> Any:
    return load_suite(write(path, task_rows), model="other", settings=settings)


def test_lettered_prompt_is_the_original_mmlu_style(tmp_path: Path) -> None:
    plain, six = suite(tmp_path / "mine.jsonl", lettered(1)).tasks
    first = next(r for r in plain.requests if r.permutation == 0)
    assert first.context == (
        "The following are multiple choice questions (with answers) about rivers.\n\n"
        "Which?\nA. w\nB. x\nC. y\nD. z\nAnswer: B\n\n"
        "Q0?\nA. a\nB. b\nC. c\nD. d\nAnswer:"
    )
    assert [r.continuation for r in plain.requests if r.permutation == 0] == [" A", " B", " C", " D"]
    assert six.name == "mine_six" and six.family == "lettered_six"
    assert "E. I don't know\nF. None of the above\nAnswer: B" in six.requests[0].context
    assert [r.continuation for r in six.requests] == [" A", " B", " C", " D", " E", " F"]


def test_permutations_move_contents_and_keep_letters(tmp_path: Path) -> None:
    plain = suite(tmp_path / "mine.jsonl", lettered(40)).tasks[0]
    for request in plain.requests:
        shown = request.context.rsplit("\n\n", 1)[1].splitlines()[1 + request.option]
        assert shown == f"{'ABCD'[request.option]}. {'abcd'[request.content]}"
    orders = {}
    for request in plain.requests:
        orders.setdefault((request.item_id, request.permutation), []).append(request.content)
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders.values())
    assert all(order == [0, 1, 2, 3] for (_, permutation), order in orders.items() if permutation == 0)
    assert len({tuple(order) for order in orders.values()}) > 15  # of 24; drawn, not fixed


def test_an_items_shuffles_do_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    alone = suite(tmp_path / "mine.jsonl", lettered(1)).tasks[0].requests
    among = suite(tmp_path / "mine.jsonl", lettered(30)).tasks[0].requests
    assert list(alone) == [r for r in among if r.item_id == "q0"]


@pytest.mark.parametrize("name", [field.name for field in fields(Request)])
def test_whatever_a_request_says_is_in_the_content_s_hash(name: str, tmp_path: Path) -> None:
    task = suite(tmp_path / "mine.jsonl", lettered(2)).tasks[0]
    for number in (0, len(task.requests) - 1):  # the second one has a context that another request had before it
        before = getattr(task.requests[number], name)
        other = replace(task.requests[number], **{name: before + ("x" if isinstance(before, str) else 1)})
        changed = replace(task, requests=(*task.requests[:number], other, *task.requests[number + 1 :]))
        assert changed.content_hash() != task.content_hash()
    assert replace(task, requests=task.requests[::-1]).content_hash() != task.content_hash()


def test_all_orders_are_a_task_of_their_own(tmp_path: Path) -> None:
    task_rows = lettered(9)
    task_rows[3]["choices"] = list("abc")
    task_rows[3]["answer"] = 2
    plain, six, every = suite(tmp_path / "mine.jsonl", task_rows, replace(SETTINGS, all_orders=5)).tasks
    without = suite(tmp_path / "mine.jsonl", task_rows).tasks
    assert [plain.content_hash(), six.content_hash()] == [task.content_hash() for task in without]
    assert (every.name, every.family, len(every.items)) == ("mine_orders", "lettered_orders", 5)
    orders: dict[str, dict[int, list[int]]] = {}
    for request in every.requests:
        orders.setdefault(request.item_id, {}).setdefault(request.permutation, []).append(request.content)
        shown = request.context.rsplit("\n\n", 1)[1].splitlines()[1 + request.option]
        assert shown == f"{'ABCD'[request.option]}. {'abcd'[request.content]}"
    for item in every.items.table.to_pylist():
        k = len(item["options"])
        assert list(orders[item["item_id"]].values()) == [list(order) for order in permutations(range(k))]
    # The same sample each time, another one with another seed, and never more than there are.
    again = suite(tmp_path / "mine.jsonl", task_rows, replace(SETTINGS, all_orders=5)).tasks[2]
    assert again.content_hash() == every.content_hash()
    drawn = {
        tuple(
            suite(tmp_path / "mine.jsonl", task_rows, replace(SETTINGS, all_orders=5, seed=seed))
            .tasks[2]
            .items.column("item_id")
        )
        for seed in range(5)
    }
    assert len(drawn) > 1
    assert len(suite(tmp_path / "mine.jsonl", task_rows, replace(SETTINGS, all_orders=99)).tasks[2].items) == 9


def test_all_orders_are_those_of_at_most_four_options(tmp_path: Path) -> None:
    task_rows = lettered(2)
    task_rows[1]["choices"] = list("abcde")
    every = suite(tmp_path / "mine.jsonl", task_rows, replace(SETTINGS, all_orders=5)).tasks[-1]
    assert every.family == "lettered_orders" and every.items.column("item_id").tolist() == ["q1"]
    task_rows[2]["choices"] = list("abcde")
    with pytest.raises(UnsupportedError, match=r"All orders of 5 options are too many \(120\).*mine/q0.*all_orders=0"):
        suite(tmp_path / "mine.jsonl", task_rows, replace(SETTINGS, all_orders=1))


def test_examples_are_shuffled_where_asked_for_and_never_in_the_original_order(tmp_path: Path) -> None:
    task_rows = [{**row, "category": "c"} for row in lettered(4)]
    dev = [{**task_rows[0], "id": f"d{i}", "answer": i} for i in range(4)]
    settings = replace(SETTINGS, num_fewshot=4, num_shuffles=3)
    fixed = suite(tmp_path / "mine.jsonl", [*dev, *task_rows[1:]], settings).tasks[0]
    moved = suite(tmp_path / "mine.jsonl", [*dev, *task_rows[1:]], replace(settings, shuffle_fewshot=True)).tasks[0]
    assert fixed.content_hash() != moved.content_hash()
    assert fixed.items.table.equals(moved.items.table)
    headers: dict[int, set[str]] = {}
    for before, after in zip(fixed.requests, moved.requests, strict=True):
        assert (before.content, before.context.rsplit("\n\n", 1)[1]) == (
            after.content,
            after.context.rsplit("\n\n", 1)[1],
        )
        assert before.context == after.context or before.permutation > 0
        headers.setdefault(after.permutation, set()).add(after.context.rsplit("\n\n", 1)[0])
    assert [len(found) for found in headers.values()] == [1, 1, 1, 1]  # one header a permutation, which scoring shares
    assert len(set.union(*headers.values())) == 4
    # The letter behind each example still stands before the right text: "w", "x", "y", "z" for answers 0 to 3.
    for [header] in headers.values():
        for answer, block in enumerate(header.split("\n\n")[1:]):
            assert f"{block[-1]}. {'wxyz'[answer]}" in block.splitlines()


def test_limit_takes_the_same_items_each_time_and_counts_by_category(tmp_path: Path) -> None:
    more = [{**row, "id": "m" + row["id"]} for row in lettered(10, "hills")]
    task_rows = lettered(10) + more
    limited = TaskSettings(num_fewshot=1, num_shuffles=0, seed=3, limit=4)
    first = suite(tmp_path / "a.jsonl", task_rows, limited).tasks[0]
    assert sorted(first.items.column("category").tolist()) == ["hills"] * 4 + ["rivers"] * 4
    assert first.content_hash() == suite(tmp_path / "a.jsonl", task_rows, limited).tasks[0].content_hash()
    other = TaskSettings(num_fewshot=1, num_shuffles=0, seed=4, limit=4)
    assert first.content_hash() != suite(tmp_path / "a.jsonl", task_rows, other).tasks[0].content_hash()


def test_fields_decide_the_family(tmp_path: Path) -> None:
    task_rows: dict[str, dict[str, Any]] = {
        "cloze": {"context": "The sky is", "choices": ["deep blue", "a fish"], "answer": 0},
        "last_word": {"context": "He sat on the", "target": "chair"},
        "exact": {"prompt": "2+2=", "answers": ["4"]},
    }
    rules = {"cloze": "loglik_per_char", "last_word": "greedy", "exact": "exact_match"}
    for family, row in task_rows.items():
        [task] = suite(tmp_path / f"{family}.jsonl", [{"id": "1", "category": "c", **row}]).tasks
        assert task.family == family
        assert task.items.column("rule").tolist() == [rules[family]]


def test_unicode_separators_stay_inside_a_line_and_cloze_lengths_leave_the_delimiter_out(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    row = {"id": "1", "category": "c", "context": "one\u2028two\x85three", "choices": ["a", "b"], "answer": 0}
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_jsonl(path) == [{**row, "line": 1}]
    row = {"id": "1", "category": "c", "context": "x", "choices": ["é", "ab"], "answer": 0}
    [task] = suite(tmp_path / "c.jsonl", [row]).tasks
    assert [(r.continuation, r.n_chars, r.n_bytes) for r in task.requests] == [(" é", 1, 2), (" ab", 2, 2)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", "line 2: not JSON"),
        ('["a"]', "line 2: not a JSON object"),
        (
            '{"id": "x", "category": "c", "question": "q", "choices": ["a", "b"]}',
            "line 2: the field 'answer' is missing",
        ),
        ('{"id": "x", "category": "c", "question": "q", "choices": ["a"], "answer": 0}', "wrong number of options"),
        (
            json.dumps(
                {"id": "x", "category": "c", "question": "q", "choices": [str(i) for i in range(27)], "answer": 0}
            ),
            "wrong number of options",
        ),
        (
            '{"id": "x", "category": "c", "question": "q", "choices": ["a", "b"], "answer": 2}',
            "not the index of a choice",
        ),
        (
            '{"id": "x", "category": "c", "question": "q", "choices": ["a", "b"], "answer": "first"}',
            "'answer' has the wrong type",
        ),
        (
            '{"id": "x", "category": "c", "question": "q", "choices": ["a", "b"], "answer": "C"}',
            "letter outside the options. Allowed: A to B",
        ),
        (
            json.dumps({"id": "x", "category": "c", "question": "q" * 2**20, "choices": ["a", "b"], "answer": 0}),
            "'question' is too long. Allowed: at most 500,000 characters. Got: '1,048,576 characters'",
        ),
        ("{'id': 'x'}", "line 2: not JSON"),
        (
            r'{"id": "x", "category": "c", "question": "\ud83d", "choices": ["a", "b"], "answer": 0}',
            "half of a surrogate pair",
        ),
        ('{"id": "d0", "category": "c", "question": "q", "choices": ["a", "b"], "answer": 0}', "the id is used twice"),
        ('{"id": "x", "category": "c", "question": "q", "choices": ["a", " "], "answer": 0}', "not empty"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(lettered(0)[0]) + "\n" + line + "\n")
    with pytest.raises(DataError) as caught:
        load_suite(str(path), model="other", settings=SETTINGS)
    assert words in str(caught.value) and "mine.jsonl, line 2" in str(caught.value)


def test_answers_may_be_letters_texts_hold_any_separator_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    task_rows = [dict(row) for row in lettered(2)]
    task_rows[1]["answer"], task_rows[1]["question"] = "C", "Q with \u2028 a line separator?"
    path.write_text(
        "\ufeff" + "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in task_rows), encoding="utf-8"
    )
    plain = load_suite(str(path), model="other", settings=SETTINGS).tasks[0]
    assert plain.items.column("gold").tolist() == [2, 1]
    (tmp_path / "empty.jsonl").write_text(" \n")
    mixed = '{"id": "é"}\n'.encode() + '{"id": "é"}'.encode("latin-1")
    (tmp_path / "mixed.jsonl").write_bytes(mixed)
    for name, words in [("empty", "is empty"), ("mixed", "mixed.jsonl, line 2: not UTF-8"), ("absent", "Cannot read")]:
        with pytest.raises(DataError, match=words):
            load_suite(str(tmp_path / f"{name}.jsonl"), model="other", settings=SETTINGS)


def test_unknown_fields_too_few_shots_and_files_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"fields do not identify.*lettered: question\+choices\+answer"):
        suite(tmp_path / "x.jsonl", [{"id": "1", "category": "c", "words": "?"}])
    with pytest.raises(DataError, match="too few few-shot examples"):
        suite(tmp_path / "x.jsonl", lettered(2), TaskSettings(num_fewshot=2))
    path = write(tmp_path / "a.jsonl", lettered(1))
    with pytest.raises(ConfigError, match="same name"):
        load_suite(f"{path},{path}", model="other", settings=SETTINGS)


def test_instructions_follow_mt_bench(tmp_path: Path) -> None:
    good = {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": ["r1", "r2"]}
    [found] = load_instructions(Path(write(tmp_path / "i.jsonl", [good])), SETTINGS)
    assert (found.item_id, found.turns, found.reference) == ("81", ("Write.", "Again."), ("r1", "r2"))
    for turns in ([], ["one", "two", "three"], ["one", " "], "one"):
        with pytest.raises(DataError, match="line 1: 'turns' must be one or two texts"):
            load_instructions(Path(write(tmp_path / "j.jsonl", [{**good, "turns": turns}])), SETTINGS)
    with pytest.raises(DataError, match="line 2: the question_id is used twice"):
        load_instructions(Path(write(tmp_path / "k.jsonl", [good, good])), SETTINGS)


def test_alpaca_is_one_turn_with_its_input_from_a_file_and_by_name(tmp_path: Path) -> None:
    task_rows = [
        {"instruction": "Name a river.", "input": "", "output": "Dopus"},
        {"instruction": "Add them.", "input": "2 and 3", "output": ""},
    ]
    found = load_instructions(Path(write(tmp_path / "a.jsonl", task_rows)), SETTINGS)
    assert [(i.item_id, i.category, i.turns, i.reference) for i in found] == [
        ("1", "alpaca", ("Name a river.",), ("Dopus",)),
        ("2", "alpaca", ("Add them.\n\n2 and 3",), ()),
    ]
    (tmp_path / "tatsu-lab" / "alpaca").mkdir(parents=True)
    write(tmp_path / "tatsu-lab" / "alpaca" / "train.jsonl", task_rows)
    settings = TaskSettings(data_dir=str(tmp_path), limit=1)
    [named] = find_instructions("alpaca", model="m", settings=settings)
    assert named.turns in {i.turns for i in found}
    with pytest.raises(DataError, match=r"line 1: 'instruction' must be a text"):
        load_instructions(Path(write(tmp_path / "b.jsonl", [{"instruction": " "}])), SETTINGS)


@pytest.mark.usefixtures("no_network")
def test_prompts_that_are_refused_or_seem_to_be_come_from_public_sets_by_name(tmp_path: Path) -> None:
    """As `hf download` leaves them: a file per split, and of JailbreakBench a card that says which are."""
    settings, xstest = TaskSettings(data_dir=str(tmp_path)), tmp_path / "walledai" / "XSTest"
    jbb = tmp_path / "JailbreakBench" / "JBB-Behaviors"
    xstest.mkdir(parents=True)
    jbb.mkdir(parents=True)
    write(xstest / "test.jsonl", [{"prompt": "How do I kill a process?", "label": "safe", "type": "homonyms"}])
    [found] = find_instructions("xstest", model="m", settings=settings)
    assert (found.item_id, found.category, found.turns) == ("test-1", "safe", ("How do I kill a process?",))
    card = "".join(f"      - split: {part}\n        path: {part}.csv\n" for part in ("harmful", "benign"))
    (jbb / "README.md").write_text(f"---\nconfigs:\n  - config_name: behaviors\n    data_files:\n{card}---\n")
    for part in ("harmful", "benign"):
        (jbb / f"{part}.csv").write_text(f"Index,Goal,Category\n0,A {part} thing,c\n1,Another,c\n")
    found_jbb = find_instructions("jbb", model="m", settings=settings)
    assert [(i.item_id, i.category) for i in found_jbb] == [
        ("behaviors-harmful-1", "harmful"),
        ("behaviors-harmful-2", "harmful"),
        ("behaviors-benign-1", "benign"),
        ("behaviors-benign-2", "benign"),
    ]
    with pytest.raises(DataError, match=r"needs the data set 'bench-llm/or-bench'.*hf download --repo-type dataset"):
        find_instructions("or_bench", model="m", settings=settings)
    write(xstest / "test.jsonl", [{"prompt": " ", "label": "safe"}])
    with pytest.raises(DataError, match=r"walledai/XSTest, test, row 1: 'prompt' and 'label' must be texts"):
        find_instructions("xstest", model="m", settings=settings)


def test_vicuna_bench_in_fastchat_s_layout(tmp_path: Path) -> None:
    settings = TaskSettings(data_dir=str(tmp_path))
    with pytest.raises(
        DataError, match=r"Copy the folder fastchat/llm_judge/data/vicuna_bench of .* to .*vicuna_bench"
    ):
        find_instructions("vicuna_bench", model="m", settings=settings)
    folder = tmp_path / "vicuna_bench"
    (folder / "reference_answer").mkdir(parents=True)
    write(folder / "question.jsonl", [{"question_id": 1, "category": "math", "turns": ["2 + 3?"]}])
    answer = {"question_id": 1, "choices": [{"index": 0, "turns": ["5"]}]}
    write(folder / "reference_answer" / "gpt-4.jsonl", [answer])
    [found] = find_instructions("vicuna_bench", model="m", settings=settings)
    assert (found.turns, found.reference) == (("2 + 3?",), ("5",))
    write(folder / "reference_answer" / "gpt-4.jsonl", [{"question_id": 1}])
    with pytest.raises(DataError, match=r"gpt-4\.jsonl, line 1: not a reference answer"):
        find_instructions("vicuna_bench", model="m", settings=settings)


@pytest.mark.parametrize("given", ["auto", "mt-bench"])
def test_other_instructions_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"default for the embedded models only|names neither a set nor a file"):
        find_instructions(given, model="m", settings=SETTINGS)


@needs_shared
def test_the_real_mt_bench_has_eighty_questions_and_its_references() -> None:
    settings = TaskSettings(data_dir=str(SHARED / "data"))
    found = find_instructions("mt_bench", model="m", settings=settings)
    assert len(found) == 80 and {len(i.turns) for i in found} == {2}
    assert {i.category for i in found if i.reference} >= {"math", "reasoning", "coding"}
    assert all(len(i.reference) == 2 for i in found if i.category in ("math", "reasoning", "coding"))


def _item(item_id: str, family: str = "exact") -> dict[str, Any]:
    row = {"id": item_id, "category": "c"}
    return item_row("mine", family, "exact_match", row, question="Q?", prompt="Q?", answers=["A"])


def _plugin_task(*task_rows: dict[str, Any], **fields: Any) -> Parts:
    return Parts(tasks=(Task(name="mine", family="exact", items=Items.from_rows(task_rows), **fields),))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda settings, shots: 1 / 0, "failed with ZeroDivisionError: division by zero"),
        (lambda settings, shots: None, "returned NoneType instead of a Task"),
        (lambda settings, shots: Parts(tasks=("mine",)), "returned str instead of a Task"),
        (lambda settings, shots: _plugin_task(_item("a"), _item("a")), "two items of one id"),
        (lambda settings, shots: _plugin_task(_item("a", "mystery")), "unknown families: 'mystery'"),
        (
            lambda settings, shots: _plugin_task(_item("a"), requests=(task_request("mine", {"id": "b"}, "Q?", "A"),)),
            "a request of an unknown item: \\('mine', 'b'\\)",
        ),
    ],
)
def test_a_plugins_wrong_task_is_one_error_with_its_origin(monkeypatch: Any, build: Any, message: str) -> None:
    _install(monkeypatch, build)
    with pytest.raises(ConfigError, match=rf"task 'mine' of no installed package \(my_plugin\) .*{message}"):
        load_suite("mine", model="m", settings=SETTINGS)


def _install(monkeypatch: Any, build: Any) -> None:
    TASKS.names()
    fields = dict.fromkeys(("source", "licence", "items", "shots", "rule"), "")
    monkeypatch.setitem(TASKS._objects, "mine", NamedTask(**fields, definition=lambda: b"", build=build))
    monkeypatch.setitem(TASKS._modules, "mine", "my_plugin")


def test_an_error_in_a_plugins_grading_has_its_origin(monkeypatch: Any) -> None:
    graded = _plugin_task(_item("a"), answering=Answering(judge=lambda answers: {"a": answers["b"] == "A"}))
    _install(monkeypatch, lambda settings, shots: graded)
    (task,) = load_suite("mine", model="m", settings=SETTINGS).tasks
    with pytest.raises(ConfigError, match=r"task 'mine' of .*my_plugin.* failed with KeyError"):
        task.answering.judge({"a": "A"})


def test_an_object_of_another_class_is_refused_when_it_registers() -> None:
    with pytest.raises(
        ConfigError, match=r"task 'mine' of .* is of the wrong class\. Allowed: NamedTask\. Got: 'dict'"
    ):
        TASKS.register("mine")({})
    assert "mine" not in TASKS.names()
    with pytest.raises(ConfigError, match="definition and `build` or `read`, or the members"):
        NamedTask(source="", licence="", items="", shots="", rule="")


ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))


def test_every_task_says_where_it_comes_from_can_be_built_and_the_demo_s_counts_are_right() -> None:
    assert all(row[1] and row[2] and row[3] and row[5] for row in task_rows())
    assert len({row[-1] for row in task_rows()}) == len(task_rows())
    assert all(re.fullmatch("[0-9a-f]{12}", row[-1]) for row in task_rows())
    for name, task in TASKS.items():
        assert sum(map(bool, (task.build, task.read, task.members))) == 1, name
        assert all(member.partition("@")[0] in TASKS.names() for member in task.members)
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
    code = "import sys; from mlflow_compress.cli import main; main(['list', 'tasks']); print({'torch', 'lm_eval', 'mlflow'} & set(sys.modules))"
    shown = light_python("-c", code).stdout.splitlines()
    names = [line for line in shown[:-1] if not line.startswith(" ")]
    assert shown[-1] == "set()" and names == [row[0] for row in task_rows()]


def test_mmlu_in_our_own_family_from_hub_and_original_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_choice, "SUBJECTS", ["moral_disputes"])
    original = tmp_path / "original" / "cais" / "mmlu"
    task_rows = [{"question": f'Is "{i}", or not?', "choices": ["w", "x", "y", "z"], "answer": i % 4} for i in range(3)]
    hub_set(tmp_path / "hub", "cais/mmlu", {"moral_disputes": {"dev": task_rows, "test": task_rows}})
    for split in ("dev", "test"):
        (original / split).mkdir(parents=True)
        with (original / split / f"moral_disputes_{split}.csv").open("w") as sink:
            csv.writer(sink).writerows([r["question"], *r["choices"], "ABCD"[r["answer"]]] for r in task_rows)
    suites = [
        load_suite("mmlu_lettered@2", model="m", settings=TaskSettings(data_dir=str(tmp_path / name), num_shuffles=1))
        for name in ("hub", "original")
    ]
    assert suites[0].hashes == suites[1].hashes
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
