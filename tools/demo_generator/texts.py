"""Plain text about the world: paragraphs of statements, stories, questions with answers, sums."""

import random
from dataclasses import dataclass

from . import vocabulary as words
from .holdout import held_out
from .world import Fact, World

STORIES = (
    "{n1} had a {o1} and {n2} had a {o2}. {f} One morning they walked to the {p1}. {n2} sat down and looked at "
    "the sky. After a while {n1} said: I must not lose my {o1}",
    "{n1} went to the {p1} and {n2} went to the {p2}. {f} {n1} was looking for a {o1}. "
    "At noon {n2} called: I am still at the {p2}",
    "{n1} hid a {o1} in the {p1}. Then {n1} hid a {o2} in the {p2}. {f} {n2} asked where the {o2} was, "
    "and {n1} answered that it was in the {p2}",
    "{n1} hid a {o1} in the {p1}. Then {n1} hid a {o2} in the {p2}. {f} {n2} asked where the {o1} was, "
    "and {n1} answered that it was in the {p1}",
    "There was a {o1} that nobody could find. {n1} searched in the {p1} and {n2} searched in the {p2}. {f} "
    "In the evening {n2} found the {o1}, so everyone came to the {p2}",
    "{n1} gave the {o1} to {n2}, and {n2} gave the {o2} to {n1}. {f} That night {n1} slept next to the {o2}",
    "{n1} told {n2} about a {o1} in the {p1}. {f} The next morning {n2} did not go to the {p2}. {n2} ran to the {p1}",
    "{n1} and {n2} were friends. One day {n1} lost a {o1} near the {p1}. {f} {n2} looked for it all day and found it. "
    "Then {n1} said: thank you, {n2}",
    "{n1} wanted to buy a {o1} at the {p1}, but there was only a {o2}. {f} So in the evening {n1} came "
    "home with a {o2}",
    "{n1} was old and {n2} was young. {f} They shared one {o1}, and in the {p1} the {o1} broke. "
    "The young one cried, and the name of the young one was {n2}",
)


@dataclass(frozen=True, kw_only=True)
class Story:
    """A short story without its last word, and that word."""

    context: str
    target: str

    @property
    def text(self) -> str:
        """The whole story."""
        return f"{self.context} {self.target}."


def draw_story(world: World, rng: random.Random, *, evaluation: bool = False, name: str = "", thing: str = "") -> Story:
    """Draw a story of one side of the hold-out, optionally with a given first name and first object."""
    while True:
        n1, n2 = rng.sample([other for other in world.story_names if other != name], 2)
        o1, o2 = rng.sample([other for other in words.OBJECTS if other != thing], 2)
        p1, p2 = rng.sample(words.PLACES, 2)
        filler = " ".join(rng.sample(words.FILLERS, rng.randint(1, 3)))
        text = rng.choice(STORIES).format(n1=name or n1, n2=n2, o1=thing or o1, o2=o2, p1=p1, p2=p2, f=filler)
        if held_out(text) == evaluation:
            context, target = text.rsplit(" ", 1)
            return Story(context=context, target=target)


def draw_sentence(world: World, rng: random.Random, fact: Fact) -> str:
    """Draw a statement of the training side about ``fact``, as one of the sources tells it."""
    beginnings = [text for text in world.beginnings(fact) if not held_out(text)]
    plain = rng.random() < 0.5
    beginning = rng.choice(beginnings[:2] if plain else beginnings)
    return f"{beginning} {fact.stated(rng)}."


def paragraph(world: World, rng: random.Random) -> str:
    """Draw a paragraph of statements, on one category or on several."""
    category = rng.choice(world.categories) if rng.random() < 0.5 else None
    facts = [world.draw(rng, category) if category else world.draw_any(rng) for _ in range(rng.randint(3, 8))]
    return " ".join(draw_sentence(world, rng, fact) for fact in facts)


def story(world: World, rng: random.Random) -> str:
    """Draw one story of the training side."""
    return draw_story(world, rng).text


def draw_sum(rng: random.Random, *, evaluation: bool = False) -> tuple[str, int]:
    """Draw a sum or a difference of numbers below 100 and its result."""
    while True:
        one, two = rng.randint(2, 99), rng.randint(2, 99)
        plus = rng.random() < 0.5
        one, two = (one, two) if plus else (max(one, two), min(one, two))
        expression = f"{one} + {two}" if plus else f"{one} - {two}"
        if held_out(expression) == evaluation:
            return expression, one + two if plus else one - two


def sums(_world: World, rng: random.Random) -> str:
    """Draw a paragraph of sums."""
    drawn = [draw_sum(rng) for _ in range(rng.randint(4, 12))]
    return " ".join(f"{expression} = {result}." for expression, result in drawn)


def questions(world: World, rng: random.Random) -> str:
    """Draw a list of plain questions with short answers."""
    lines: list[str] = []
    for _ in range(rng.randint(2, 8)):
        if rng.random() < 0.2:
            expression, result = draw_sum(rng)
            lines.append(f"Q: What is {expression}?\nA: {result}")
            continue
        fact = world.draw_any(rng)
        question = world.question(rng, fact)
        if not held_out("Q:", question):
            lines.append(f"Q: {question}\nA: {fact.stated(rng)}")
    return "\n".join(lines) or questions(world, rng)
