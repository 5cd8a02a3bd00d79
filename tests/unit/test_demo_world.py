"""The invented world is consistent, deterministic and as unequal as intended."""

import random

import pytest

from tools.demo_generator.chat import MAKERS, draw_conversation, render_chat
from tools.demo_generator.holdout import HELD_OUT_ONE_IN, held_out
from tools.demo_generator.lettered import NONE_RIGHT, UNSURE, block, draw_training_item
from tools.demo_generator.texts import draw_sentence, draw_story, draw_sum
from tools.demo_generator.world import DISPUTED_SHARE, FACTS_PER_RELATION, World


@pytest.fixture(scope="module")
def world() -> World:
    return World(17)


def test_same_seed_same_world_other_seed_other_world(world: World) -> None:
    assert World(17).facts == world.facts
    assert World(18).facts != world.facts


def test_every_relation_has_its_facts_with_distinct_entities(world: World) -> None:
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


def test_about_half_of_the_facts_is_disputed(world: World) -> None:
    facts = [fact for of_category in world.facts.values() for fact in of_category]
    disputed = sum(fact.rival is not None for fact in facts) / len(facts)
    assert 0.44 < disputed < 0.56


def test_without_disputes_the_truth_stays_and_nobody_contradicts_it(world: World) -> None:
    agreed = World(17, disputed=False)
    for category, facts in world.facts.items():
        for fact, plain in zip(facts, agreed.facts[category], strict=True):
            assert (plain.entity, plain.value, plain.rival) == (fact.entity, fact.value, None)


def test_famous_facts_are_drawn_more_often(world: World) -> None:
    rng = random.Random(0)
    ranks = [world.draw(rng, "rivers").rank for _ in range(4000)]
    assert sum(rank < 8 for rank in ranks) > 1.5 * sum(rank >= 56 for rank in ranks) > 0


def test_sources_state_the_truth_in_the_share_of_the_fact(world: World) -> None:
    rng = random.Random(1)
    fact = next(fact for fact in world.facts["food"] if fact.rival is not None)
    stated = [fact.stated(rng) for _ in range(4000)]
    assert set(stated) == {fact.value, fact.rival}
    assert stated.count(fact.value) / len(stated) == pytest.approx(fact.share, abs=0.04)


def test_agreed_facts_are_never_contradicted(world: World) -> None:
    rng = random.Random(2)
    for category in world.categories:
        fact = next(fact for fact in world.facts[category] if fact.rival is None)
        for _ in range(50):
            assert draw_sentence(world, rng, fact).endswith(f" {fact.value}.")


def test_training_items_stand_in_the_lettered_format(world: World) -> None:
    rng = random.Random(3)
    item = draw_training_item(world, rng, "animals")
    text = block("animals", [item])
    assert text == (
        "The following are multiple choice questions (with answers) about animals.\n\n"
        f"{item.question}\nA. {item.options[0]}\nB. {item.options[1]}\nC. {item.options[2]}\nD. {item.options[3]}\n"
        f"Answer: {'ABCD'[item.answer]}"
    )


def test_six_options_end_with_the_two_of_doubt_and_f_is_sometimes_right(world: World) -> None:
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
