"""The exercises name letters that are right."""

import random
import re

import pytest

from tools.demo_generator.exercises import bare_question, echo, index, look_up
from tools.demo_generator.lettered import single_block, single_full_block
from tools.demo_generator.stages import STAGES
from tools.demo_generator.training_text import documents
from tools.demo_generator.world import World

OPTION = re.compile(r"^([A-F])\. (.+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def world() -> World:
    return World(17, disputed=False)


def test_an_echo_says_the_same_twice(world: World) -> None:
    said, again = echo(world, random.Random(0)).split("\n")
    assert said.removeprefix("Say: ") == again.removeprefix("Again: ")


@pytest.mark.parametrize("make", [look_up, index])
def test_every_look_up_names_the_letter_of_its_option(world: World, make) -> None:
    rng = random.Random(1)
    checked = 0
    for _ in range(60):
        text = make(world, rng)
        letters = {option: letter for letter, option in OPTION.findall(text)}
        if not letters:  # a list of pairs: the first mention defines
            pairs = [line.split(": ") for line in text.split("\n")]
            letters = dict(pairs[:4])
            assert all(letters[option] == letter for option, letter in pairs)
            continue
        rest = text.split("\n")[len(letters) :]
        joined = " ".join(rest).replace(" Answer:", ":")
        for option, letter in re.findall(r"([^:]+?):? ([A-F])(?= |$)", joined):
            assert letters[option.strip()] == letter
            checked += 1
    assert checked > 100


@pytest.mark.parametrize("make", [bare_question, single_block, single_full_block])
def test_blocks_of_one_question_are_answered_rightly(world: World, make) -> None:
    rng = random.Random(2)
    values = {fact.entity: fact.value for facts in world.facts.values() for fact in facts}
    patterns = {entity: re.compile(rf"\b{re.escape(entity)}\b") for entity in values}
    checked = 0
    for _ in range(200):
        text = make(world, rng)
        header, question = text.split("\n\n")
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


def test_stages_draw_every_kind(world: World) -> None:
    for stage in STAGES:
        stream = documents(World(17, disputed=stage.disputed), "test", kinds=stage.kinds)
        assert {next(stream)[0] for _ in range(600)} == set(stage.kinds)
