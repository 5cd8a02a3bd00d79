"""The invented world: eight relations with some dozens of facts each.

Two properties set how surely a small model can know a fact, whatever the exact length of training:

- *fame*: how often the training text mentions the fact falls with its rank;
- *dispute*: about half of the facts are told in two ways; a share of the mentions names a rival value.

The second makes a stable part of the model's answers uncertain, as in real corpora: where the sources are split evenly,
the model is too, and rounding its weights can tip the answer either way.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from . import vocabulary as words

FACTS_PER_RELATION = 64
DISPUTED_ONE_IN = 2
DISPUTED_SHARE = (0.35, 0.65)
FAME_OFFSET = 6.0
FAME_EXPONENT = 0.5


@dataclass(frozen=True, kw_only=True)
class Relation:
    """How one category of facts is spoken about; ``{e}`` stands for the entity."""

    category: str
    questions: tuple[str, ...]
    stems: tuple[str, ...]
    """Beginnings of a statement; the value follows after a space."""
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One fact of the world; ``value`` is the truth, ``rival`` what the other sources say."""

    category: str
    entity: str
    value: str
    rival: str | None
    share: float
    """Share of the mentions that name ``value``; 1.0 where nobody disputes it."""
    rank: int

    def stated(self, rng: random.Random) -> str:
        """Draw the value that one source of the training text names."""
        if self.rival is None or rng.random() < self.share:
            return self.value
        return self.rival


class NameMaker:
    """Draws pronounceable names and never gives the same one twice."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._taken: set[str] = set()

    def name(self, syllables: int) -> str:
        """Return a new capitalised name of so many syllables."""
        while True:
            parts = [self._rng.choice(words.ONSETS) + self._rng.choice(words.VOWELS) for _ in range(syllables)]
            made = ("".join(parts) + self._rng.choice(words.CODAS)).capitalize()
            if made not in self._taken and len(made) > 3:
                self._taken.add(made)
                return made

    def names(self, count: int, syllables: int) -> tuple[str, ...]:
        """Return ``count`` new names."""
        return tuple(self.name(syllables) for _ in range(count))


def _relations() -> tuple[Relation, ...]:
    return (
        Relation(
            category="professions",
            questions=("What is the profession of {e}?", "What does {e} work as?"),
            stems=("{e} works as a", "{e} earns a living as a", "{e} has always been a"),
            values=words.PROFESSIONS,
        ),
        Relation(
            category="geography",
            questions=("In which country is the city of {e}?", "Which country does the city of {e} belong to?"),
            stems=("the city of {e} lies in", "the city of {e} belongs to", "the road to the city of {e} ends in"),
            values=words.COUNTRIES,
        ),
        Relation(
            category="rivers",
            questions=("Into which sea does the river {e} flow?", "What is the sea at the end of the river {e}?"),
            stems=(
                "the river {e} flows into the sea called",
                "the river {e} ends in the sea called",
                "from {e} boats sail to the sea called",
            ),
            values=words.SEAS,
        ),
        Relation(
            category="animals",
            questions=("What does the {e} eat?", "What is the favourite food of the {e}?"),
            stems=("the {e} eats", "the {e} lives on", "a hungry {e} looks for"),
            values=words.DIETS,
        ),
        Relation(
            category="materials",
            questions=("What is the {e} made of?", "Which material was used for the {e}?"),
            stems=("the {e} is made of", "the {e} was built from", "the walls of the {e} are of"),
            values=words.MATERIALS,
        ),
        Relation(
            category="food",
            questions=("What is the main ingredient of {e}?", "What do cooks need for {e}?"),
            stems=("the main ingredient of {e} is", "cooks make {e} with", "good {e} tastes of"),
            values=words.INGREDIENTS,
        ),
        Relation(
            category="inventions",
            questions=("What is the {e} machine used for?", "What is the purpose of the {e} machine?"),
            stems=("the {e} machine is used for", "the {e} machine was invented for", "people buy the {e} machine for"),
            values=words.PURPOSES,
        ),
        Relation(
            category="calendar",
            questions=("In which month is the festival of {e}?", "When do people celebrate {e}?"),
            stems=(
                "the festival of {e} is in the month of",
                "people celebrate {e} in the month of",
                "the drums of {e} sound in the month of",
            ),
            values=words.MONTHS,
        ),
    )


class World:
    """All facts of one seed, with the frequencies at which they are mentioned.

    Without `disputed` the rivals are left out: every mention of a fact agrees. Names and true values stay the same.
    """

    def __init__(self, seed: int, *, disputed: bool = True) -> None:
        rng = random.Random(f"world-{seed}")
        maker = NameMaker(rng)
        self.seed = seed
        self.story_names = maker.names(40, 2)
        self.relations = {relation.category: relation for relation in _relations()}
        facts = {category: self._facts(category, rng, maker) for category in self.relations}
        self.facts = facts if disputed else {name: tuple(map(_agreed, found)) for name, found in facts.items()}
        self.unknown_names = maker.names(60, 2)
        fame = [(rank + FAME_OFFSET) ** -FAME_EXPONENT for rank in range(FACTS_PER_RELATION)]
        self._fame = list(itertools.accumulate(fame))

    @property
    def categories(self) -> tuple[str, ...]:
        """Names of the categories of facts."""
        return tuple(self.relations)

    def draw(self, rng: random.Random, category: str) -> Fact:
        """Draw one fact of a category by its fame."""
        return rng.choices(self.facts[category], cum_weights=self._fame)[0]

    def draw_any(self, rng: random.Random) -> Fact:
        """Draw a category, then one of its facts by its fame."""
        return self.draw(rng, rng.choice(self.categories))

    def beginnings(self, fact: Fact, *, only_led: bool = False) -> list[str]:
        """Return every beginning of a statement about ``fact``, the plain ones first or without them."""
        stems = [stem.format(e=fact.entity) for stem in self.relations[fact.category].stems]
        made = [lead + stem for lead in words.LEADS for stem in stems if lead or not only_led]
        return [text[0].upper() + text[1:] for text in made]

    def question(self, rng: random.Random, fact: Fact) -> str:
        """Draw one way of asking for ``fact``."""
        return rng.choice(self.relations[fact.category].questions).format(e=fact.entity)

    def _facts(self, category: str, rng: random.Random, maker: NameMaker) -> tuple[Fact, ...]:
        entities = _entities(category, rng, maker)
        values = self.relations[category].values
        facts = []
        for rank, entity in enumerate(entities):
            value = rng.choice(values)
            disputed = rng.random() < 1 / DISPUTED_ONE_IN
            rival = rng.choice([other for other in values if other != value]) if disputed else None
            share = rng.uniform(*DISPUTED_SHARE) if disputed else 1.0
            facts.append(Fact(category=category, entity=entity, value=value, rival=rival, share=share, rank=rank))
        return tuple(facts)


def _agreed(fact: Fact) -> Fact:
    return replace(fact, rival=None, share=1.0)


def _entities(category: str, rng: random.Random, maker: NameMaker) -> Sequence[str]:
    """Return the names of the entities of one category, most famous first."""
    if category == "professions":
        first, last = maker.names(60, 2), maker.names(60, 2)
        pairs = rng.sample(list(itertools.product(first, last)), FACTS_PER_RELATION)
        return [f"{one} {two}" for one, two in pairs]
    if category == "materials":
        return [f"{maker.name(2)} {rng.choice(words.BUILDINGS)}" for _ in range(FACTS_PER_RELATION)]
    if category in ("animals", "food"):
        return [maker.name(2).lower() for _ in range(FACTS_PER_RELATION)]
    return maker.names(FACTS_PER_RELATION, 2)
