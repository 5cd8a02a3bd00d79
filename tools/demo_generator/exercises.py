"""Exercises: short lists and blocks that teach, step by step, to find the letter of an option."""

import random

from . import vocabulary as words
from .lettered import LETTERS, block, full_block, is_held_out, option_lines, shuffled
from .world import World

FORMS = ("{option} {letter}", "{option} {letter}", "{option}: {letter}", "{option}\nAnswer: {letter}")
ASKED = ("{option}", "{option}", "Find {option}.", "Where is {option}?", "Which one is {option}?")


def echo(world: World, rng: random.Random) -> str:
    """Draw a list of words that is said twice; it teaches copying."""
    drawn = [rng.choice((rng.choice(world.story_names), rng.choice(words.OBJECTS))) for _ in range(rng.randint(4, 14))]
    said = ", ".join(drawn)
    return f"Say: {said}.\nAgain: {said}."


def _options(world: World, rng: random.Random, count: int) -> list[str]:
    pools = [words.OBJECTS, words.PLACES, world.story_names, *(found.values for found in world.relations.values())]
    return rng.sample(rng.choice(pools), count)


def look_up(world: World, rng: random.Random) -> str:
    """Draw four options, and answers that repeat an option and name its letter."""
    options = _options(world, rng, 4)
    asked = [rng.randrange(4) for _ in range(rng.randint(2, 6))]
    if rng.random() < 0.3:
        order = rng.sample(range(4), 4)
        return "\n".join(f"{options[index]}: {LETTERS[index]}" for index in (*order, *asked))
    return "\n".join([*option_lines(options), *(f"{options[index]}\nAnswer: {LETTERS[index]}" for index in asked)])


def index(world: World, rng: random.Random) -> str:
    """Draw four or six options and many look-ups in one of several forms."""
    options = _options(world, rng, rng.choice((4, 4, 4, 6)))
    form = rng.choice(FORMS)
    lines = option_lines(options)
    for _ in range(rng.randint(3, 10)):
        asked = rng.randrange(len(options))
        lines.append(form.format(option=options[asked], letter=LETTERS[asked]))
    return "\n".join(lines)


def bare_question(world: World, rng: random.Random) -> str:
    """Draw a block whose question only repeats an option, or only names an entity."""
    relation = world.relations[rng.choice(world.categories)]
    while True:
        right = rng.choice(relation.values)
        question = rng.choice(ASKED).format(option=right)
        if rng.random() < 0.3:
            fact = world.draw(rng, relation.category)
            question, right = fact.entity, fact.stated(rng)
        wrong = rng.sample([value for value in relation.values if value != right], 3)
        item = shuffled(rng, relation.category, (question, right, wrong))
        if not is_held_out(item.question, item.options):
            return (full_block if rng.random() < 0.3 else block)(relation.category, [item])
