"""The training text: streams of documents drawn from the generators, without the held-out side."""

import random
from collections.abc import Callable, Iterator, Mapping

from .chat import training_chat
from .exercises import bare_question, echo, index, look_up
from .holdout import held_out
from .lettered import single_block, single_full_block, training_block
from .texts import paragraph, questions, story, sums
from .world import World

Maker = Callable[[World, random.Random], str]
"""Draws one document of the training side."""

Kinds = Mapping[str, tuple[float, Maker]]
"""Kinds of documents with the share of documents drawn from each."""

PROSE: Kinds = {
    "statements": (0.30, paragraph),
    "stories": (0.12, story),
    "questions": (0.08, questions),
    "sums": (0.05, sums),
}
"""Plain documents."""

EXERCISES: Kinds = {"look-ups": (0.40, look_up), "echoes": (0.20, echo), "bare questions": (0.40, bare_question)}
"""First stage: copying, and the letters of options that are named."""

SHORT: Kinds = {
    "statements": (0.15, paragraph),
    "questions": (0.04, questions),
    "single questions": (0.35, single_block),
    "full answers": (0.13, single_full_block),
    "bare questions": (0.16, bare_question),
    "indices": (0.06, index),
    "look-ups": (0.08, look_up),
    "echoes": (0.03, echo),
}
"""Second stage: facts, and questions one at a time."""

KINDS: Kinds = {
    **PROSE,
    "lettered": (0.35, training_block),
    "full answers": (0.08, single_full_block),
    "bare questions": (0.04, bare_question),
    "chat": (0.16, training_chat),
    "look-ups": (0.05, look_up),
    "echoes": (0.03, echo),
}
"""Last stage, and calibration text: everything, with few-shot blocks."""


def documents(
    world: World, stream: str, *, kinds: Kinds = KINDS, evaluation: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield kinds and documents for ever.

    Another `stream` gives other documents; with `evaluation` they are those kept for evaluation, not for training.
    """
    rng = random.Random(f"documents-{world.seed}-{stream}")
    names, weights = list(kinds), [share for share, _ in kinds.values()]
    while True:
        name = rng.choices(names, weights)[0]
        document = kinds[name][1](world, rng)
        if held_out("document", document) == evaluation:
            yield name, document
