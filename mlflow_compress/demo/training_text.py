"""The training text: a stream of documents drawn from all generators, without the held-out side."""

import random
from collections.abc import Callable, Iterator, Mapping

from .chat import training_chat
from .holdout import held_out
from .lettered import look_up, recall_block, step_block, training_block
from .texts import echo, glossary, paragraph, questions, story, sums
from .world import World

Maker = Callable[[World, random.Random], str]
"""Draws one document of the training side."""

PROSE: dict[str, tuple[float, Maker]] = {
    "statements": (0.30, paragraph),
    "stories": (0.12, story),
    "questions": (0.08, questions),
    "sums": (0.05, sums),
}
"""Kinds of plain documents with the share of documents drawn from each."""

KINDS: dict[str, tuple[float, Maker]] = {
    **PROSE,
    "lettered": (0.25, training_block),
    "steps": (0.25, step_block),
    "glossaries": (0.10, glossary),
    "chat": (0.16, training_chat),
    "look-ups": (0.12, look_up),
    "echoes": (0.05, echo),
}
"""Kinds of training documents; a lettered block is about four times as long as the others."""


WARM_UP: dict[str, tuple[float, Maker]] = {
    "look-ups": (0.40, look_up),
    "echoes": (0.20, echo),
    "recalls": (0.40, recall_block),
}
"""Exercises without facts; beginning with them shortens the plateau before the letters are understood."""


def documents(
    world: World, stream: str, *, kinds: Mapping[str, tuple[float, Maker]] = KINDS, evaluation: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield kinds and documents for ever.

    Parameters
    ----------
    world : World
        Where the facts come from.
    stream : str
        Name of the random stream; another name gives other documents.
    kinds : Mapping
        Kinds of documents with their shares: ``KINDS``, ``PROSE`` or ``WARM_UP``.
    evaluation : bool
        Yield documents kept for evaluation instead of those kept for training.
    """
    rng = random.Random(f"documents-{world.seed}-{stream}")
    names, weights = list(kinds), [share for share, _ in kinds.values()]
    while True:
        name = rng.choices(names, weights)[0]
        document = kinds[name][1](world, rng)
        if held_out("document", document) == evaluation:
            yield name, document
