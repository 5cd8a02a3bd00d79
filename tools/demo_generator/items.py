"""Evaluation items, all from the held-out side of the generators, as rows of JSON Lines files."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .chat import MAKERS, draw_conversation
from .holdout import held_out
from .lettered import Choice, fact_content, is_held_out, reading_content, shuffled, sum_content
from .texts import draw_story, draw_sum
from .world import Fact, World

Row = dict[str, Any]

DEV_PER_CATEGORY = 5
TEST_PER_CATEGORY = 132
CLOZE_CATEGORIES = ("professions", "rivers", "animals", "materials", "food", "inventions")
CLOZE_PER_CATEGORY = 50
LASTWORD_ITEMS = 300
EXACT_ITEMS = 152
INSTRUCTIONS_PER_CATEGORY = 6


def _spread(facts: Iterable[Fact], count: int) -> list[Fact]:
    """Take ``count`` facts evenly over all ranks of fame."""
    pool = list(facts)
    return [pool[index * len(pool) // count] for index in range(count)]


def _choice_item(
    world: World, rng: random.Random, category: str, fact: Fact | None, position: int, seen: set[str]
) -> Choice:
    """Draw a held-out item of ``category`` that is not in ``seen`` and add it there."""
    while True:
        if category == "arithmetic":
            content = sum_content(rng, evaluation=True)
        elif fact is None:
            content = reading_content(world, rng)
        else:
            content = fact_content(world, rng, fact, fact.value, with_rival=True)
        item = shuffled(rng, category, content, position=position)
        if is_held_out(item.question, item.options) and item.body not in seen:
            seen.add(item.body)
            return item


def choice_rows(world: World) -> Iterator[Row]:
    """Yield the lettered items: five examples (``dev``) and then the test items of every category."""
    rng = random.Random(f"choice-{world.seed}")
    seen: set[str] = set()
    for category in (*world.categories, "arithmetic", "reading"):
        facts = world.facts.get(category)
        dev: Sequence[Fact | None] = [None] * DEV_PER_CATEGORY
        test: Sequence[Fact | None] = [None] * TEST_PER_CATEGORY
        if facts:
            dev = [fact for fact in facts if fact.rival is None][:DEV_PER_CATEGORY]
            test = _spread((fact for fact in facts if fact not in dev), TEST_PER_CATEGORY)
        for split, drawn in (("dev", dev), ("test", test)):
            positions = [index % 4 for index in range(len(drawn))]
            rng.shuffle(positions)
            for index, (fact, position) in enumerate(zip(drawn, positions, strict=True)):
                item = _choice_item(world, rng, category, fact, position, seen)
                yield {
                    "id": f"choice-{category}-{split}-{index:03d}",
                    "category": category,
                    "question": item.question,
                    "choices": list(item.options),
                    "answer": item.answer,
                    "split": split,
                }


def cloze_rows(world: World) -> Iterator[Row]:
    """Yield beginnings of statements with four possible ends."""
    rng = random.Random(f"cloze-{world.seed}")
    for category in CLOZE_CATEGORIES:
        values, pool = world.relations[category].values, list(world.facts[category])
        kept = {fact: [text for text in world.beginnings(fact, only_led=True) if held_out(text)] for fact in pool}
        pool = [fact for fact in pool if kept[fact]]
        for index, fact in enumerate(_spread(pool, min(CLOZE_PER_CATEGORY, len(pool)))):
            beginning = rng.choice(kept[fact])
            wrong = rng.sample([value for value in values if value not in (fact.value, fact.rival)], 3)
            if fact.rival is not None:
                wrong[0] = fact.rival
            # The last word goes into the options, so that each has several tokens.
            context, last = beginning.rsplit(" ", 1)
            ends = [f"{last} {value}" for value in (fact.value, *wrong)]
            item = shuffled(rng, category, (context, ends[0], ends[1:]))
            yield {
                "id": f"cloze-{category}-{index:03d}",
                "category": category,
                "context": context,
                "choices": list(item.options),
                "answer": item.answer,
            }


def lastword_rows(world: World) -> Iterator[Row]:
    """Yield stories whose last word follows from what was told before."""
    rng = random.Random(f"lastword-{world.seed}")
    seen: set[str] = set()
    while len(seen) < LASTWORD_ITEMS:
        drawn = draw_story(world, rng, evaluation=True)
        if drawn.context in seen:
            continue
        yield {
            "id": f"lastword-{len(seen):03d}",
            "category": "stories",
            "context": drawn.context,
            "target": drawn.target,
        }
        seen.add(drawn.context)


def exact_rows(world: World) -> Iterator[Row]:
    """Yield questions whose short answer is to be written out: those on agreed facts that are held out, then sums."""
    rng = random.Random(f"exact-{world.seed}")
    asked: dict[str, tuple[str, str]] = {}
    for category, facts in world.facts.items():
        for fact in facts:
            for form in world.relations[category].questions:
                question = form.format(e=fact.entity)
                if fact.rival is None and held_out("Q:", question):
                    asked[question] = category, fact.value
    while len(asked) < EXACT_ITEMS:
        expression, result = draw_sum(rng, evaluation=True)
        asked[f"What is {expression}?"] = "sums", str(result)
    for number, (question, (category, answer)) in enumerate(asked.items()):
        yield {
            "id": f"exact-{number:03d}",
            "category": category,
            "prompt": f"Q: {question}\nA:",
            "answers": [answer],
        }


def instruction_rows(world: World) -> Iterator[Row]:
    """Yield two-turn instructions in MT-Bench's schema, with the expected replies as references."""
    rng = random.Random(f"instructions-{world.seed}")
    number = 1
    seen: set[str] = set()
    for category in MAKERS:
        for _ in range(INSTRUCTIONS_PER_CATEGORY):
            turns = draw_conversation(world, rng, category, evaluation=True).turns
            while turns[0][0] in seen:
                turns = draw_conversation(world, rng, category, evaluation=True).turns
            seen.add(turns[0][0])
            yield {
                "question_id": number,
                "category": category,
                "turns": [said for said, _ in turns],
                "reference": [reply for _, reply in turns],
            }
            number += 1


ROWS: dict[str, Callable[[World], Iterator[Row]]] = {
    "choice.jsonl": choice_rows,
    "cloze.jsonl": cloze_rows,
    "lastword.jsonl": lastword_rows,
    "exact.jsonl": exact_rows,
    "instructions.jsonl": instruction_rows,
}
"""One generator of rows per file of items."""
