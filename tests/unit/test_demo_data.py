"""The committed files of the demonstration: schema, balance, hold-out, tokenizer and size.

What writes them is pinned by its output, byte for byte.
"""

import hashlib
import itertools
import json
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from mlflow_compress.demo import DATA_DIR, MODEL_DIR
from tools.demo_generator.chat import render_chat
from tools.demo_generator.checks import letter_logits, prompts
from tools.demo_generator.files import SEED, data_files
from tools.demo_generator.stages import STAGES
from tools.demo_generator.training_text import documents
from tools.demo_generator.world import World

MT_BENCH = {"writing", "roleplay", "extraction", "math", "coding", "reasoning", "stem", "humanities"}
FIELDS = {
    "choice.jsonl": {"id", "category", "question", "choices", "answer", "split"},
    "cloze.jsonl": {"id", "category", "context", "choices", "answer"},
    "lastword.jsonl": {"id", "category", "context", "target"},
    "exact.jsonl": {"id", "category", "prompt", "answers"},
    "instructions.jsonl": {"question_id", "category", "turns", "reference"},
}


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA_DIR / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def training_documents() -> list[str]:
    """A regenerated sample from the beginning of the very streams that the model was trained on."""
    made: list[str] = []
    for stage in STAGES:
        stream = documents(World(SEED, disputed=stage.disputed), stage.name, kinds=stage.kinds)
        made += [text for _, text in itertools.islice(stream, 3000)]
    return made


def test_files_are_what_the_seed_gives_and_stay_below_ten_megabytes() -> None:
    for name, content in data_files(SEED).items():
        assert (DATA_DIR / name).read_bytes() == content.encode("utf-8"), name
    files = [path for folder in (DATA_DIR, MODEL_DIR) for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 10_000_000


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_rows_have_the_fields_of_their_family(name: str) -> None:
    read = rows(name)
    assert all(set(row) == FIELDS[name] for row in read)
    key = "question_id" if name == "instructions.jsonl" else "id"
    assert len({row[key] for row in read}) == len(read)


def test_choice_counts_categories_and_balance() -> None:
    read = rows("choice.jsonl")
    test = [row for row in read if row["split"] == "test"]
    assert len(test) >= 1200
    categories = {row["category"] for row in test}
    assert len(categories) >= 6
    dev = Counter(row["category"] for row in read if row["split"] == "dev")
    assert dev == dict.fromkeys(categories, 5)
    positions = Counter(row["answer"] for row in test)
    assert {position: positions[position] for position in range(4)} == dict.fromkeys(range(4), len(test) // 4)
    assert all(len(set(row["choices"])) == 4 for row in read)


def test_counts_of_the_other_families_and_categories_of_mt_bench() -> None:
    assert len(rows("cloze.jsonl")) == 300
    assert len(rows("lastword.jsonl")) == 300
    assert len(rows("exact.jsonl")) >= 150
    read = rows("instructions.jsonl")
    assert len(read) >= 40
    assert {row["category"] for row in read} == MT_BENCH
    assert all(len(row["turns"]) == len(row["reference"]) == 2 for row in read)


def test_tokens_of_choices_letters_digits_and_texts(tokenizer: Any) -> None:
    for row in rows("cloze.jsonl"):
        assert len(set(row["choices"])) == 4
        for choice in row["choices"]:
            assert choice == choice.strip()
            assert len(tokenizer.encode(f" {choice}")) > 1
    for letter in "ABCDEF":
        whole = tokenizer.encode(f"Answer: {letter}")
        assert whole[:-1] == tokenizer.encode("Answer:")
        assert tokenizer.decode(whole[-1:]) == f" {letter}"
    assert len(tokenizer.encode("2048")) == 4
    text = "The river Dopus ends in the Sea of Glass.\n45 + 41 = 86."
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.bos_token_id not in tokens
    assert tokenizer.eos_token_id not in tokens
    corpus = (DATA_DIR / "corpus.txt").read_text(encoding="utf-8")
    calibration = (DATA_DIR / "calibration.txt").read_text(encoding="utf-8")
    assert 30_000 <= len(tokenizer(corpus)["input_ids"]) <= 45_000
    assert 70_000 <= len(tokenizer(calibration)["input_ids"]) <= 110_000


def test_nothing_that_is_evaluated_stands_in_training_or_calibration(training_documents: list[str]) -> None:
    calibration = (DATA_DIR / "calibration.txt").read_text(encoding="utf-8")
    seen = "\n\n".join([*training_documents, calibration, ""])
    made = []
    for row in rows("choice.jsonl"):
        options = [f"{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True)]
        made.append("\n".join([row["question"], *options]) + "\n")
    made += [f"{row['context']} {row['choices'][row['answer']]}" for row in rows("cloze.jsonl")]
    made += [f"{row['context']} {row['target']}" for row in rows("lastword.jsonl")]
    made += [f"{row['prompt']} " for row in rows("exact.jsonl")]
    made += [f"<|user|>{row['turns'][0]}<|end|>" for row in rows("instructions.jsonl")]
    assert [rendering for rendering in made if rendering in seen] == []
    corpus = (DATA_DIR / "corpus.txt").read_text(encoding="utf-8").strip().split("\n\n")
    assert not set(corpus) & set(training_documents)


def test_chat_template_is_the_format_of_training(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == render_chat((("Hello?", "Hello."),))
    asked = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "<|user|>Hello?<|end|>\n<|assistant|>"


def test_longest_few_shot_prompt_with_six_options_fits(tokenizer: Any) -> None:
    read = rows("choice.jsonl")
    longest = 0
    for category in {row["category"] for row in read}:
        bodies = {"dev": [0], "test": [0]}
        for row in read:
            if row["category"] == category:
                options = [*row["choices"], "I don't know", "None of the above"]
                lines = [f"{letter}. {choice}" for letter, choice in zip("ABCDEF", options, strict=True)]
                text = "\n".join([row["question"], *lines, "Answer: A\n\n"])
                bodies[row["split"]].append(len(tokenizer.encode(text)))
        longest = max(longest, sum(bodies["dev"]) + max(bodies["test"]) + 40)
    assert longest < 900


@pytest.mark.ci
def test_the_model_is_right_in_55_to_85_percent_of_the_lettered_items(tokenizer: Any) -> None:
    """So that answers can flip both ways; every fourth item, as the model card says how it does on all."""
    model = LlamaForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    asked = prompts(rows("choice.jsonl"))[::4]
    logits = letter_logits(model, tokenizer, [text for text, _ in asked])
    right = logits.argmax(dim=1) == torch.tensor([answer for _, answer in asked])
    assert 0.55 <= right.float().mean().item() <= 0.85


def test_the_training_text_is_that_of_the_model(training_documents: list[str]) -> None:
    """The first documents of each stage; most of their kinds are in the calibration text too."""
    assert len(training_documents) == 3000 * len(STAGES)
    for number, wanted in enumerate(("995d05c05e40902e", "55ef887f6f923999", "d8538432e31b09b2")):
        stage = "\n\n".join(training_documents[3000 * number : 3000 * (number + 1)])
        assert hashlib.sha256(stage.encode()).hexdigest()[:16] == wanted, STAGES[number].name
