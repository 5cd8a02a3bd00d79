"""Calibration text that holds evaluation items or corpus paragraphs is refused, and nothing else is."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.auto import AutoTokenizer

from mlflow_compress import demo
from mlflow_compress.commands.main import run as main
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.errors import CheckpointError, DataError
from mlflow_compress.items.contamination import check_contamination
from mlflow_compress.items.sources.calibration_sets import CalibrationSet, load_calibration
from mlflow_compress.items.sources.question_files import load_file
from mlflow_compress.items.task import Corpus, Task, TaskSettings
from mlflow_compress.records import Items
from tools.demo_generator.files import apart

pytestmark = pytest.mark.usefixtures("no_network")

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


DATASET = {
    "wikitext2": "Salesforce/wikitext",
    "c4": "allenai/c4",
    "pile": "mit-han-lab/pile-val-backup",
    "ultrachat": "HuggingFaceH4/ultrachat_200k",
}
FILE = {
    "wikitext2": "wikitext-2-raw-v1/train.jsonl",
    "c4": "en/c4-train.00000-of-01024.json.gz",
    "pile": "validation.jsonl",
    "ultrachat": "data/train_sft.jsonl",
}
CARD = {
    "wikitext2": {"config_name": "wikitext-2-raw-v1", "data_files": [{"split": "train", "path": FILE["wikitext2"]}]},
    "ultrachat": {"config_name": "default", "data_files": [{"split": "train_sft", "path": FILE["ultrachat"]}]},
}


def write_set(data: Path, name: str, texts: list[str]) -> None:
    """A data set as `hf download` leaves it, with made-up texts."""
    path = data / DATASET[name] / FILE[name]
    path.parent.mkdir(parents=True)
    if name in CARD:
        (data / DATASET[name] / "README.md").write_text(f"---\n{json.dumps({'configs': [CARD[name]]})}\n---\n")
    rows = [{"messages": [{"role": "user", "content": t}]} if name == "ultrachat" else {"text": t} for t in texts]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return load_file(tmp_path / "q.jsonl", TaskSettings(num_fewshot=0, num_shuffles=0)).tasks[0]


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
        check_contamination([text], [task], [])
        return
    with pytest.raises(DataError, match=f"contains {len(held)} of 3 items of task 'q'. Got: .*{held[0]}"):
        check_contamination(["something else", text], [task], [])


def test_a_run_does_not_cross_two_texts_and_a_document_with_an_item_is_left_out_whole(task: Task) -> None:
    half = len(LONG) // 2
    check_contamination([LONG[:half], LONG[half:]], [task], [])
    drawn = ["one\n\ntwo", f"before\n\n{LONG}\n\nafter", "three"]
    assert apart(drawn, [task]) == ["one\n\ntwo", "three"]


def test_paragraphs_of_a_corpus_count_when_they_are_long_and_the_embedded_text_holds_no_item() -> None:
    paragraph = " ".join(f"word{i}" for i in range(60))
    corpus = Corpus(name="held_out", text=f"A heading\n{paragraph}\nA short line that repeats\n")
    check_contamination(["A short line that repeats"], [], [corpus])
    rolling = Task(name="rolling", family="rolling", items=Items.from_rows([]), documents=(corpus.text,))
    for tasks, corpora, name in (([], [corpus], "held_out"), ([rolling], [], "rolling")):
        with pytest.raises(DataError, match=f"1 paragraphs of '{name}'"):
            check_contamination([f"Before. {paragraph} After."], tasks, corpora)
    main.check(MainConfig(all_orders=50))


def test_main_refuses_before_anything_runs(tmp_path: Path, task: Task) -> None:
    (tmp_path / "calibration.txt").write_text(f"Some text.\n\n{LONG}\n")
    config = MainConfig(calibration=str(tmp_path / "calibration.txt"), tasks=str(tmp_path / "q.jsonl"), num_fewshot=0)
    with pytest.raises(DataError, match="calibration text contains 1 of 3 items"):
        main.check(config)
    main.check(MainConfig(tasks=str(tmp_path / "q.jsonl"), num_fewshot=0))


@pytest.mark.parametrize("name", ["wikitext2", "c4", "pile", "ultrachat"])
def test_sets_by_name_come_from_data_dir_and_are_held_against_the_items(tmp_path: Path, task: Task, name: str) -> None:
    data = tmp_path / "hub"
    write_set(data, name, ["Some text.", LONG, "Some more text. " * 300])
    config = MainConfig(calibration=name, tasks=str(tmp_path / "q.jsonl"), num_fewshot=0, data_dir=str(data))
    with pytest.raises(DataError, match="calibration text contains 1 of 3 items"):
        main.check(config)
    shutil.rmtree(data / DATASET[name])
    with pytest.raises(
        DataError, match=f"'calibration={name}' needs .*hf download --repo-type dataset {DATASET[name]}"
    ):
        main.check(config)


def test_what_each_set_takes(tmp_path: Path) -> None:
    texts = [f"  text {i}\n" for i in range(2_600)]
    for name in ("c4", "pile", "ultrachat"):
        write_set(tmp_path, name, texts)
    write_set(
        tmp_path, "wikitext2", ["", " = First = \n", " a \n", " = = Part = = \n", " b \n", " = Second = \n", " c \n"]
    )
    found = {name: load_calibration(name, model="m", data_dir=str(tmp_path)) for name in DATASET}
    assert found["c4"].texts == tuple(texts[:2_500])
    assert found["wikitext2"].texts == (" = First = \n a \n = = Part = = \n b \n", " = Second = \n c \n")
    assert [c[0]["content"] for c in found["ultrachat"].conversations] == texts[:2_500]
    # `datasets` shuffles with numpy's generator: AWQ's order.
    order = np.random.default_rng(42).permutation(2_600)[:2_500]
    assert found["pile"].texts == tuple(f"text {i}" for i in order) and found["pile"].longest == 512


def test_files_of_texts_and_conversations_are_shown_as_the_model_reads_them(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL_DIR)
    messages = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": LONG}]
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"text": "plain"}) + "\n")
    found = load_calibration(str(path), model="m", data_dir="")
    assert found.rendered(tokenizer) == ["plain", f"<|user|>Hello?<|end|>\n<|assistant|>{LONG}<|end|>\n"]
    assert found.plain() == ["plain", "Hello?", LONG]
    some = CalibrationSet(name="s", texts=("short", "much longer than that"), longest=4)
    assert some.rendered(tokenizer) == ["short"]
    tokenizer.chat_template = None
    with pytest.raises(CheckpointError, match="no chat template"):
        found.rendered(tokenizer)
    path.write_text('{"text": "x"}\n{"messages": [{"role": "user"}]}\n')
    with pytest.raises(DataError, match=r"c\.jsonl, line 2: neither a text nor a conversation"):
        load_calibration(str(path), model="m", data_dir="")
