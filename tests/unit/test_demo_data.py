"""The committed files of the demonstration: schema, balance, hold-out, tokenizer and size.

The exercises name letters that are right.
"""

import itertools
import json
import random
import re
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from mlflow_compress.demo import DATA_DIR, MODEL_DIR
from tools.demo_generator.chat import MAKERS, draw_conversation, render_chat
from tools.demo_generator.checks import letter_logits, prompts
from tools.demo_generator.exercises import bare_question, echo, index, look_up
from tools.demo_generator.files import SEED, data_files
from tools.demo_generator.holdout import HELD_OUT_ONE_IN, held_out
from tools.demo_generator.lettered import NONE_RIGHT, UNSURE, block, draw_training_item, single_block, single_full_block
from tools.demo_generator.stages import STAGES
from tools.demo_generator.texts import draw_sentence, draw_story, draw_sum
from tools.demo_generator.training_text import documents
from tools.demo_generator.world import DISPUTED_SHARE, FACTS_PER_RELATION, World

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


OPTION = re.compile(r"^([A-F])\. (.+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def agreed() -> World:
    return World(17, disputed=False)


def test_an_echo_says_the_same_twice(agreed: World) -> None:
    said, again = echo(agreed, random.Random(0)).split("\n")
    assert said.removeprefix("Say: ") == again.removeprefix("Again: ")


@pytest.mark.parametrize("make", [look_up, index])
def test_every_look_up_names_the_letter_of_its_option(agreed: World, make) -> None:
    rng = random.Random(1)
    checked = 0
    for _ in range(60):
        text = make(agreed, rng)
        letters = {option: letter for letter, option in OPTION.findall(text)}
        if not letters:  # a list of pairs: the first mention defines
            pairs = [line.split(": ") for line in text.split("\n")]
            letters = dict(pairs[:4])
            assert all(letters[option] == letter for option, letter in pairs)
            continue
        joined = " ".join(text.split("\n")[len(letters) :]).replace(" Answer:", ":")
        for option, letter in re.findall(r"([^:]+?):? ([A-F])(?= |$)", joined):
            assert letters[option.strip()] == letter
            checked += 1
    assert checked > 100


@pytest.mark.parametrize("make", [bare_question, single_block, single_full_block])
def test_blocks_of_one_question_are_answered_rightly(agreed: World, make) -> None:
    rng = random.Random(2)
    values = {fact.entity: fact.value for facts in agreed.facts.values() for fact in facts}
    patterns = {entity: re.compile(rf"\b{re.escape(entity)}\b") for entity in values}
    checked = 0
    for _ in range(200):
        header, question = make(agreed, rng).split("\n\n")
        options = dict(OPTION.findall(question))
        answer = question.split("Answer: ")[1]
        letter = answer[-1]
        if "full answers" in header:
            assert answer == f"{options[letter]}, {letter}"
        first = question.split("\n")[0]
        named = [entity for entity, pattern in patterns.items() if pattern.search(first)]
        if named:
            assert options[letter] in {values[entity] for entity in named}
            checked += 1
    assert checked > 20


def test_stages_draw_every_kind(agreed: World) -> None:
    for stage in STAGES:
        stream = documents(World(17, disputed=stage.disputed), "test", kinds=stage.kinds)
        assert {next(stream)[0] for _ in range(600)} == set(stage.kinds)


@pytest.fixture(scope="module")
def world() -> World:
    return World(17)


def test_a_seed_makes_one_world_whose_relations_have_distinct_entities(world: World) -> None:
    assert World(17).facts == world.facts
    assert World(18).facts != world.facts
    assert len(world.categories) == 8
    for category in world.categories:
        facts = world.facts[category]
        assert len({fact.entity for fact in facts}) == len(facts) == FACTS_PER_RELATION
        assert [fact.rank for fact in facts] == list(range(FACTS_PER_RELATION))


def test_facts_name_values_of_their_relation_and_rivals_differ(world: World) -> None:
    for category, relation in world.relations.items():
        for fact in world.facts[category]:
            assert fact.value in relation.values
            if fact.rival is None:
                assert fact.share == 1.0
            else:
                assert fact.rival in relation.values
                assert fact.rival != fact.value
                assert DISPUTED_SHARE[0] <= fact.share <= DISPUTED_SHARE[1]


def test_half_of_the_facts_is_disputed_and_without_disputes_nobody_contradicts_the_truth(world: World) -> None:
    facts = [fact for of_category in world.facts.values() for fact in of_category]
    disputed = sum(fact.rival is not None for fact in facts) / len(facts)
    assert 0.44 < disputed < 0.56
    agreed = World(17, disputed=False)
    for category, facts in world.facts.items():
        for fact, plain in zip(facts, agreed.facts[category], strict=True):
            assert (plain.entity, plain.value, plain.rival) == (fact.entity, fact.value, None)


def test_famous_facts_are_drawn_more_often_and_sources_state_the_truth_in_the_share_of_the_fact(world: World) -> None:
    rng = random.Random(0)
    ranks = [world.draw(rng, "rivers").rank for _ in range(4000)]
    assert sum(rank < 8 for rank in ranks) > 1.5 * sum(rank >= 56 for rank in ranks) > 0
    rng = random.Random(1)
    fact = next(fact for fact in world.facts["food"] if fact.rival is not None)
    stated = [fact.stated(rng) for _ in range(4000)]
    assert set(stated) == {fact.value, fact.rival}
    assert stated.count(fact.value) / len(stated) == pytest.approx(fact.share, abs=0.04)
    rng = random.Random(2)
    for category in world.categories:
        fact = next(fact for fact in world.facts[category] if fact.rival is None)
        for _ in range(50):
            assert draw_sentence(world, rng, fact).endswith(f" {fact.value}.")


def test_training_items_stand_in_the_lettered_format_and_six_options_end_with_the_two_of_doubt(world: World) -> None:
    item = draw_training_item(world, random.Random(3), "animals")
    text = block("animals", [item])
    assert text == (
        "The following are multiple choice questions (with answers) about animals.\n\n"
        f"{item.question}\nA. {item.options[0]}\nB. {item.options[1]}\nC. {item.options[2]}\nD. {item.options[3]}\n"
        f"Answer: {'ABCD'[item.answer]}"
    )
    rng = random.Random(4)
    items = [draw_training_item(world, rng, "food", options=6) for _ in range(400)]
    assert {item.options[4:] for item in items} == {(UNSURE, NONE_RIGHT)}
    share = sum(item.answer == 5 for item in items) / len(items)
    assert 0.05 < share < 0.25
    assert 0.03 < sum(item.answer == 4 for item in items) / len(items) < 0.15  # names that nobody has heard


@pytest.mark.parametrize("evaluation", [True, False])
def test_draws_stay_on_their_side_of_the_hold_out(world: World, evaluation: bool) -> None:
    rng = random.Random(5)
    for _ in range(50):
        drawn = draw_story(world, rng, evaluation=evaluation)
        assert held_out(f"{drawn.context} {drawn.target}") == evaluation
        assert drawn.target in drawn.context
        expression, result = draw_sum(rng, evaluation=evaluation)
        assert held_out(expression) == evaluation
        one, sign, two = expression.split()
        assert result == (int(one) + int(two) if sign == "+" else int(one) - int(two))


def test_hold_out_keeps_about_one_in_so_many() -> None:
    kept = sum(held_out(str(number)) for number in range(8000)) / 8000
    assert kept == pytest.approx(1 / HELD_OUT_ONE_IN, abs=0.02)


@pytest.mark.parametrize("category", sorted(MAKERS))
def test_conversations_have_two_full_turns(world: World, category: str) -> None:
    conversation = draw_conversation(world, random.Random(6), category)
    assert all(said and reply for said, reply in conversation.turns)
    assert render_chat(conversation.turns).count("<|end|>\n") == 4
