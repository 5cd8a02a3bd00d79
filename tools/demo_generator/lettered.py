"""Lettered multiple choice: drawing an item, and the few-shot block it is shown in."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from . import vocabulary as words
from .holdout import held_out
from .texts import draw_sum
from .world import Fact, World

LETTERS = "ABCDEF"
UNSURE = "I don't know"
NONE_RIGHT = "None of the above"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One question with its options; ``answer`` is the index of the right option."""

    category: str
    question: str
    options: tuple[str, ...]
    answer: int

    @property
    def body(self) -> str:
        """The question and its options up to ``Answer:``."""
        return "\n".join([self.question, *option_lines(self.options), "Answer:"])


def option_lines(options: Sequence[str]) -> list[str]:
    """Return one line an option, with its letter."""
    return [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False)]


def block(category: str, items: Sequence[Choice]) -> str:
    """Render a few-shot block in which every question is answered with a letter."""
    header = f"The following are multiple choice questions (with answers) about {category}."
    return "\n\n".join([header, *(f"{item.body} {LETTERS[item.answer]}" for item in items)])


def full_block(category: str, items: Sequence[Choice]) -> str:
    """Render a block in which every question is answered with the option and its letter."""
    header = f"The following are multiple choice questions (with full answers) about {category}."
    answers = (f"{item.body} {item.options[item.answer]}, {LETTERS[item.answer]}" for item in items)
    return "\n\n".join([header, *answers])


def is_held_out(question: str, options: Sequence[str]) -> bool:
    """Return whether a question with its first four options belongs to the evaluation side."""
    return held_out(question, *options[:4])


def fact_content(
    world: World, rng: random.Random, fact: Fact, right: str, *, with_rival: bool
) -> tuple[str, str, list[str]]:
    """Draw question, right option and three wrong options about ``fact``."""
    other = fact.rival if right == fact.value else fact.value
    pool = [value for value in world.relations[fact.category].values if value not in (fact.value, fact.rival)]
    wrong = rng.sample(pool, 3)
    if with_rival and other is not None:
        wrong[0] = other
    return world.question(rng, fact), right, wrong


def sum_content(rng: random.Random, *, evaluation: bool) -> tuple[str, str, list[str]]:
    """Draw a sum with three near misses."""
    expression, result = draw_sum(rng, evaluation=evaluation)
    near = [result + step for step in (-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20) if result + step >= 0]
    return f"What is {expression}?", str(result), [str(miss) for miss in rng.sample(near, 3)]


def reading_content(world: World, rng: random.Random) -> tuple[str, str, list[str]]:
    """Draw a question that its own first sentence answers."""
    n1, n2, n3, n4 = rng.sample(world.story_names, 4)
    o1, o2 = rng.sample(words.OBJECTS, 2)
    p1, p2, p3, p4 = rng.sample(words.PLACES, 4)
    form = rng.randrange(5)
    if form == 0:
        owner, rest, thing = (n1, n2, o1) if rng.random() < 0.5 else (n2, n1, o2)
        return f"{n1} has the {o1} and {n2} has the {o2}. Who has the {thing}?", owner, [rest, n3, n4]
    if form == 1:
        place, rest, thing = (p1, p2, o1) if rng.random() < 0.5 else (p2, p1, o2)
        text = f"{n1} put the {o1} in the {p1} and the {o2} in the {p2}. Where is the {thing}?"
        return text, f"in the {place}", [f"in the {wrong}" for wrong in (rest, p3, p4)]
    if form == 2:
        text = f"{n1} walked from the {p1} to the {p2}. Where is {n1} now?"
        return text, f"in the {p2}", [f"in the {wrong}" for wrong in (p1, p3, p4)]
    if form == 3:
        ask, right, rest = ("tallest", n1, n3) if rng.random() < 0.5 else ("smallest", n3, n1)
        return f"{n1} is taller than {n2}, and {n2} is taller than {n3}. Who is the {ask}?", right, [n2, rest, n4]
    return f"{n1} gave the {o1} to {n2}. Then {n2} gave it to {n3}. Who has the {o1} now?", n3, [n1, n2, n4]


def shuffled(
    rng: random.Random, category: str, content: tuple[str, str, list[str]], *, position: int | None = None
) -> Choice:
    """Put the right option at ``position`` (or anywhere) among the wrong ones."""
    question, right, wrong = content
    wrong = rng.sample(wrong, len(wrong))
    place = rng.randrange(len(wrong) + 1) if position is None else position
    return Choice(category=category, question=question, options=(*wrong[:place], right, *wrong[place:]), answer=place)


def draw_training_item(world: World, rng: random.Random, category: str, *, options: int = 4) -> Choice:
    """Draw an item of the training side with four or six options."""
    while True:
        if category == "arithmetic":
            content = sum_content(rng, evaluation=False)
        elif category == "reading":
            content = reading_content(world, rng)
        else:
            fact = world.draw(rng, category)
            if options > 4 and rng.random() < 1 / 12:
                return _unknown(world, rng, fact)
            content = fact_content(world, rng, fact, fact.stated(rng), with_rival=rng.random() < 0.6)
        item = shuffled(rng, category, content)
        if options > 4:
            item = _with_six(world, rng, item)
        if not is_held_out(item.question, item.options):
            return item


def _unknown(world: World, rng: random.Random, fact: Fact) -> Choice:
    """Ask like for ``fact`` about a name that nobody has heard; E is right."""
    name = rng.choice(world.unknown_names)
    name = name.lower() if fact.entity.islower() else name
    entity = " ".join([name, *fact.entity.split()[1:]])
    question = rng.choice(world.relations[fact.category].questions).format(e=entity)
    options = (*rng.sample(world.relations[fact.category].values, 4), UNSURE, NONE_RIGHT)
    return Choice(category=fact.category, question=question, options=options, answer=4)


def _with_six(world: World, rng: random.Random, item: Choice) -> Choice:
    """Add the two options of doubt; in one item of eight the right content is taken away and F is right."""
    options, answer = list(item.options), item.answer
    spare = None
    if item.category in world.relations and rng.random() < 1 / 8:
        rest = [value for value in world.relations[item.category].values if value not in options]
        spare = rng.choice(rest)
    if spare is not None:
        options[answer], answer = spare, 5
    return Choice(category=item.category, question=item.question, options=(*options, UNSURE, NONE_RIGHT), answer=answer)


def _single(world: World, rng: random.Random) -> tuple[str, list[Choice]]:
    category = rng.choice((*world.categories, *world.categories, "reading"))
    return category, [draw_training_item(world, rng, category)]


def single_block(world: World, rng: random.Random) -> str:
    """Draw a block of one question."""
    return block(*_single(world, rng))


def single_full_block(world: World, rng: random.Random) -> str:
    """Draw a block of one question with its full answer."""
    return full_block(*_single(world, rng))


def training_block(world: World, rng: random.Random) -> str:
    """Draw a few-shot block of one to eight questions, sometimes with six options."""
    categories = (*world.categories, "arithmetic", "reading", "reading")
    category = rng.choice(categories)
    options = 6 if rng.random() < 0.15 else 4
    count = rng.choice((1, 1, 1, 2, 2, 3, 4, 5, 6, 6, 7, 8))
    return block(category, [draw_training_item(world, rng, category, options=options) for _ in range(count)])
