"""Two-turn conversations, under the category names of MT-Bench, about what the small model can know."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from . import vocabulary as words
from .holdout import held_out
from .texts import draw_sentence, draw_story, draw_sum
from .world import World

Turns = tuple[tuple[str, str], tuple[str, str]]
"""Two pairs of what the user says and what the assistant answers."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation of two turns."""

    category: str
    turns: Turns


def render_chat(turns: tuple[tuple[str, str], ...], system: str = "") -> str:
    """Render turns as the chat template of the tokenizer does."""
    head = f"<|system|>{system}<|end|>\n" if system else ""
    return head + "".join(f"<|user|>{said}<|end|>\n<|assistant|>{reply}<|end|>\n" for said, reply in turns)


def _writing(world: World, rng: random.Random) -> Turns:
    name, other = rng.sample(world.story_names, 2)
    thing, second = rng.sample(words.OBJECTS, 2)
    ask = rng.choice(("Write a short story about {n} and a {o}.", "Tell me a story about {n} and a {o}."))
    again = rng.choice(("Now write a story about {n} and a {o}.", "Now tell another story, about {n} and a {o}."))
    return (
        (ask.format(n=name, o=thing), draw_story(world, rng, name=name, thing=thing).text),
        (again.format(n=other, o=second), draw_story(world, rng, name=other, thing=second).text),
    )


def _roleplay(world: World, rng: random.Random) -> Turns:
    person = world.draw(rng, "professions")
    dish = world.draw(rng, "food")
    job = person.stated(rng)
    ask = rng.choice(("Imagine that you are {e}. Introduce yourself.", "Pretend to be {e} and say hello."))
    return (
        (ask.format(e=person.entity), f"Hello, my name is {person.entity}. I work as a {job} and I like my work."),
        (
            f"What do you need to cook {dish.entity}?",
            f"I am a {job}, but I can cook. For {dish.entity} I need {dish.stated(rng)}.",
        ),
    )


def _extraction(world: World, rng: random.Random) -> Turns:
    n1, n2 = rng.sample(world.story_names, 2)
    o1, o2 = rng.sample(words.OBJECTS, 2)
    p1, p2 = rng.sample(words.PLACES, 2)
    text = f"{n1} carried a {o1} to the {p1}. {n2} carried a {o2} to the {p2}."
    return (
        (f"Read this text: {text} Which people are in it?", f"The people are {n1} and {n2}."),
        rng.choice(
            (
                ("Now name the things that they carried.", f"The things are a {o1} and a {o2}."),
                ("Now name the places.", f"The places are the {p1} and the {p2}."),
            )
        ),
    )


def _math(_world: World, rng: random.Random) -> Turns:
    expression, result = draw_sum(rng)
    more = rng.randint(1, 9)
    ask = rng.choice(("What is {x}?", "Please compute {x}.", "How much is {x}?"))
    return (
        (ask.format(x=expression), f"{expression} = {result}."),
        (f"Now add {more} to the result.", f"{result} + {more} = {result + more}."),
    )


def _coding(_world: World, rng: random.Random) -> Turns:
    number = rng.randint(2, 99)
    (verb, word, sign), (verb2, word2, sign2) = rng.sample(
        (("adds {n} to", "add", "+"), ("subtracts {n} from", "subtract", "-"), ("multiplies by {n}", "multiply", "*")),
        2,
    )
    return (
        (
            f"Write a Python function that {verb.format(n=number)} a number.",
            f"def {word}_{number}(x):\n    return x {sign} {number}",
        ),
        (
            f"Now write one that {verb2.format(n=number)} a number.",
            f"def {word2}_{number}(x):\n    return x {sign2} {number}",
        ),
    )


def _reasoning(world: World, rng: random.Random) -> Turns:
    n1, n2, n3 = rng.sample(world.story_names, 3)
    word, most, least = rng.choice(
        (("older", "oldest", "youngest"), ("taller", "tallest", "smallest"), ("faster", "fastest", "slowest"))
    )
    return (
        (
            f"{n1} is {word} than {n2}. {n2} is {word} than {n3}. Who is the {most}?",
            f"{n1} is {word} than {n2} and {n2} is {word} than {n3}, so {n1} is the {most}.",
        ),
        (f"And who is the {least}?", f"The {least} of the three is {n3}."),
    )


def _facts(world: World, rng: random.Random, categories: tuple[str, ...]) -> Turns:
    category = rng.choice(categories)
    first, second = world.draw(rng, category), world.draw(rng, category)
    ask = rng.choice(("{q}", "I would like to know: {q}", "Can you tell me? {q}"))
    return (
        (ask.format(q=world.question(rng, first)), draw_sentence(world, rng, first)),
        (f"Thank you. {world.question(rng, second)}", draw_sentence(world, rng, second)),
    )


def _stem(world: World, rng: random.Random) -> Turns:
    return _facts(world, rng, ("animals", "materials", "inventions"))


def _humanities(world: World, rng: random.Random) -> Turns:
    return _facts(world, rng, ("geography", "rivers", "calendar", "food", "professions"))


MAKERS: dict[str, Callable[[World, random.Random], Turns]] = {
    "writing": _writing,
    "roleplay": _roleplay,
    "reasoning": _reasoning,
    "math": _math,
    "coding": _coding,
    "extraction": _extraction,
    "stem": _stem,
    "humanities": _humanities,
}
"""One maker of conversations per MT-Bench category."""


def draw_conversation(world: World, rng: random.Random, category: str, *, evaluation: bool = False) -> Conversation:
    """Draw a conversation of one side of the hold-out; its first instruction decides the side."""
    while True:
        turns = MAKERS[category](world, rng)
        if held_out("turn", turns[0][0]) == evaluation:
            return Conversation(category=category, turns=turns)


def training_chat(world: World, rng: random.Random) -> str:
    """Draw a conversation of the training side with one or two turns, sometimes with a system message."""
    conversation = draw_conversation(world, rng, rng.choice(tuple(MAKERS)))
    turns = conversation.turns if rng.random() < 0.75 else conversation.turns[:1]
    system = "You are a helpful assistant." if rng.random() < 0.15 else ""
    return render_chat(turns, system)
