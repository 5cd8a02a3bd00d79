"""Solving, and measuring in place, on models whose KL is a formula."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mlflow_compress.commands.search.choice import Choice, InPlace, choose_formats
from mlflow_compress.decide.cost_table import Allocation, CostTable, Limit, StoredSizes
from mlflow_compress.errors import ConfigError

Kl = Callable[[tuple[int, ...]], float]
SIZES = StoredSizes(
    groups=("a", "b", "c"), formats=("x:3", "x:4"), layers=np.array([[3, 4]] * 3), base=48, rest=0, weights=24
)
SPREAD = np.linspace(0.9, 1.1, 40)
"""Windows differ, with a mean of 1."""


def additive(choice: tuple[int, ...]) -> float:
    return float(np.dot([0.5, 0.3, 0.2], [1 - c for c in choice]))


def interacting(choice: tuple[int, ...]) -> float:
    """The first two groups do little alone, and much together."""
    small = [1 - c for c in choice]
    return additive(choice) * 0.2 + small[0] * small[1] * 1.0 + 0.15 * small[2]


def in_baseline(kl: Kl) -> CostTable:
    """Return the costs of one group at a time."""
    alone = [[kl(tuple(0 if g == i else 1 for i in range(3))) if f == 0 else 0.0 for f in range(2)] for g in range(3)]
    return CostTable(sizes=SIZES, start=np.zeros(40), added=np.array(alone)[:, :, None] * SPREAD)


class Models:
    """Makes and measures choices, and counts. Checkpoints cost `drift` times what their modules cost together."""

    def __init__(self, kl: Kl, drift: float = 1.0) -> None:
        self.kl, self.drift = kl, drift
        self.made: list[tuple[int, ...]] = []
        self.passes: list[tuple[int, ...]] = []
        self.around: tuple[Allocation, float] | None = None  # What costs around the first checkpoint choose

    def make(self, allocation: Allocation, limit: Limit) -> tuple[Any, str]:
        self.made.append(allocation.choice)
        return None, "".join(map(str, allocation.choice))

    def measure(self, folder: str) -> Any:
        return self.drift * self.kl(tuple(map(int, folder))) * SPREAD

    def together(self, choices: Sequence[tuple[int, ...]]) -> Any:
        self.passes += choices
        return np.stack([self.kl(choice) * SPREAD for choice in choices])

    def uniform(self, name: str) -> Any:
        return self.kl((SIZES.formats.index(name),) * 3) * SPREAD

    def choose(self, limit: Limit, rounds: int = 2, passes: int = 6, table: CostTable | None = None) -> Choice:
        table = table or in_baseline(self.kl)
        place = InPlace(table=table, together=self.together, passes=passes, rounds=rounds, tolerance=0.25)
        mixtures = place.choose(limit, passes)
        return choose_formats(
            limit,
            table,
            mixtures,
            make=self.make,
            measure=self.measure,
            around=lambda first: self.around,
            uniform=self.uniform,
        )


def test_where_costs_add_up_the_first_choice_is_confirmed() -> None:
    models = Models(additive)
    found = models.choose(Limit(kind="max_bytes", value=10))
    assert found.allocation.choice == (1, 0, 0) and found.round == 0 and models.made == [(1, 0, 0)]
    assert found.predicted == pytest.approx(found.measured) == pytest.approx(0.5)


def test_interactions_are_found_in_place_and_only_the_best_and_the_first_become_checkpoints() -> None:
    """Alone the third group costs most. But the first two must not both be small."""
    limit = Limit(kind="max_bytes", value=10)
    blind = Models(interacting).choose(limit, rounds=0)
    assert blind.allocation.choice == (0, 0, 1) and blind.measured == pytest.approx(1.16)
    assert blind.predicted == pytest.approx(0.16)
    models = Models(interacting, drift=1.05)
    found = models.choose(limit)
    best = min((interacting(c), c) for c in itertools.product((0, 1), repeat=3) if sum(c) <= 1)
    assert (found.measured, found.allocation.choice) == (pytest.approx(1.05 * best[0]), best[1])
    assert found.round == 1 and models.made == [(0, 0, 1), best[1]]
    assert found.allocation.gap == 0.0 and found.predicted == pytest.approx(best[0], rel=0.3)


def test_what_costs_around_the_first_checkpoint_choose_is_kept_where_it_is_closer() -> None:
    """The checkpoint of (0, 1, 0) is better than its modules together promise; no round in place finds it."""
    limit = Limit(kind="max_bytes", value=10)
    models = Models(interacting)
    assert models.choose(limit, rounds=0).allocation.choice == (0, 0, 1)
    table = in_baseline(interacting)
    models.around = table.allocated((0, 1, 0)), 0.3
    found = models.choose(limit, rounds=0)
    assert found.allocation.choice == (0, 1, 0) and (found.round, found.predicted) == (1, 0.3)
    assert found.measured == pytest.approx(interacting((0, 1, 0)))
    models.around = table.allocated((0, 0, 0)), 0.1
    assert models.choose(limit, rounds=0).allocation.choice == (0, 0, 1)  # farther than the first


@pytest.mark.parametrize("seed", range(6))
def test_it_is_never_worse_than_the_first_choice_within_its_passes(seed: int) -> None:
    """A random function of all choices: no choice is measured twice, and the passes are kept to."""
    values = dict(zip(itertools.product((0, 1), repeat=3), np.random.default_rng(seed).uniform(0.1, 1, 8), strict=True))
    values[1, 1, 1] = 0.0
    for passes in (1, 3, 6):
        models = Models(values.__getitem__)
        found = models.choose(Limit(kind="max_bytes", value=11), rounds=5, passes=passes)
        assert found.measured <= values[models.passes[0]] and sum(found.allocation.choice) <= 2
        assert len(models.passes) == len(set(models.passes)) <= passes + 6 + 1  # one format for all is one more


def test_the_smallest_variant_has_its_upper_end_within_the_limit() -> None:
    limit = Limit(kind="max_kl", value=0.4)
    found = Models(interacting).choose(limit)
    assert found.is_inside(limit) and found.high <= 0.4
    inside = [c for c in itertools.product((0, 1), repeat=3) if interacting(c) * 1.02 < 0.4]
    assert found.allocation.n_bytes == min(9 + sum(c) for c in inside)


def test_the_interval_counts_not_the_mean_alone_and_a_closest_one_says_that_it_is_outside() -> None:
    """Exactly at the limit the mean keeps to it, and the upper end of its interval does not."""
    found = Models(additive).choose(Limit(kind="max_kl", value=0.5))
    assert found.allocation.choice != (1, 0, 0) and found.measured < 0.5
    # Together everything costs more than alone, by an amount that no choice avoids.
    models = Models(lambda choice: additive(choice) + (0.3 if sum(choice) < 3 else 0.25))
    limit = Limit(kind="max_kl", value=0.2)
    assert not models.choose(limit, table=in_baseline(additive)).is_inside(limit)


def test_a_limit_that_nothing_keeps_to_is_refused() -> None:
    models = Models(lambda choice: 1.0 + additive(choice))
    assert in_baseline(models.kl).costs.min() == 0.0
    with pytest.raises(ConfigError, match="max_bytes is out of range"):
        models.choose(Limit(kind="max_bytes", value=8))
    assert models.made == []


def test_a_mix_that_is_not_surely_closer_than_one_format_for_all_is_not_chosen() -> None:
    """10 bytes: by its costs, 4 bits for the first group gain a little. In half of the windows they lose as much."""
    models = Models(lambda choice: 1.0 - 0.001 * sum(choice))
    table = CostTable(sizes=SIZES, start=np.zeros(40), added=np.full((3, 2, 1), 0.3) - [[[0.0], [0.01]]] + 0 * SPREAD)
    limit, plain = Limit(kind="max_bytes", value=10), models.measure
    models.measure = lambda folder: plain(folder) + (0.01 * (-1.0) ** np.arange(40) if "1" in folder else 0.0)  # type: ignore[method-assign]
    found = models.choose(limit, rounds=0, table=table)
    assert found.allocation.choice == (0, 0, 0) and found.allocation.gap is None
    assert len(models.made) == 2 and sum(models.made[0]) == 1
    assert found.measured == pytest.approx(1.0)
    models.measure = plain  # type: ignore[method-assign]
    assert sum(models.choose(limit, rounds=0, table=table).allocation.choice) == 1
