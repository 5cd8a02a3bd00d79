"""Solving, measuring and refitting, on models whose KL is a formula."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mlflow_compress.commands.search.choice import Choice, choose_formats
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
    """Makes and measures choices, and counts."""

    def __init__(self, kl: Kl) -> None:
        self.kl = kl
        self.made: list[tuple[int, ...]] = []
        self.refits = 0

    def make(self, allocation: Allocation, limit: Limit) -> tuple[Any, str]:
        self.made.append(allocation.choice)
        return None, "".join(map(str, allocation.choice))

    def measure(self, folder: str) -> Any:
        return self.kl(tuple(map(int, folder))) * SPREAD

    def refit(self, choice: Choice) -> CostTable:
        self.refits += 1
        chosen = choice.allocation.choice

        def added(group: int, fmt: int) -> float:
            other = tuple(fmt if i == group else c for i, c in enumerate(chosen))
            return self.kl(other) - self.kl(chosen)

        table = np.array([[added(g, f) for f in range(2)] for g in range(3)])
        return CostTable(sizes=SIZES, start=choice.kl, added=table[:, :, None] * SPREAD)

    def uniform(self, name: str) -> Any:
        return self.kl((SIZES.formats.index(name),) * 3) * SPREAD

    def choose(self, limit: Limit, rounds: int = 2) -> Choice:
        return choose_formats(
            limit,
            in_baseline(self.kl),
            rounds=rounds,
            tolerance=0.25,
            make=self.make,
            measure=self.measure,
            refit=self.refit,
            uniform=self.uniform,
        )


def test_costs_that_add_up_are_not_measured_again() -> None:
    models = Models(additive)
    found = models.choose(Limit(kind="max_bytes", value=10))
    assert found.allocation.choice == (1, 0, 0) and models.refits == 0 and found.round == 0
    assert found.predicted == pytest.approx(found.measured) == pytest.approx(0.5)


def test_interactions_are_found_by_refitted_costs() -> None:
    """Alone the third group costs most. But the first two must not both be small."""
    limit = Limit(kind="max_bytes", value=10)
    blind = Models(interacting).choose(limit, rounds=0)
    assert blind.allocation.choice == (0, 0, 1) and blind.measured == pytest.approx(1.16)
    models = Models(interacting)
    found = models.choose(limit)
    best = min((interacting(c), c) for c in itertools.product((0, 1), repeat=3) if sum(c) <= 1)
    assert (found.measured, found.allocation.choice) == (pytest.approx(best[0]), best[1])
    assert found.round == 1 and models.made == [(0, 0, 1), best[1]]


def test_rounds_are_bounded_and_no_choice_is_made_twice() -> None:
    models = Models(lambda choice: interacting(choice) * (1 + sum(choice)))
    models.choose(Limit(kind="max_bytes", value=11), rounds=5)
    assert len(models.made) == len(set(models.made)) <= 6 and models.refits <= 5


def test_the_smallest_variant_has_its_upper_end_within_the_limit() -> None:
    limit = Limit(kind="max_kl", value=0.4)
    models = Models(interacting)
    found = models.choose(limit)
    assert found.is_inside(limit) and found.high <= 0.4
    inside = [c for c in itertools.product((0, 1), repeat=3) if interacting(c) * 1.02 < 0.4]
    assert found.allocation.n_bytes == min(9 + sum(c) for c in inside)


def test_the_interval_counts_not_the_mean_alone() -> None:
    """Exactly at the limit the mean keeps to it, and the upper end of its interval does not."""
    found = Models(additive).choose(Limit(kind="max_kl", value=0.5))
    assert found.allocation.choice != (1, 0, 0) and found.measured < 0.5


def test_a_limit_that_nothing_keeps_to_is_refused() -> None:
    models = Models(lambda choice: 1.0 + additive(choice))
    table = in_baseline(models.kl)
    assert table.costs.min() == 0.0
    with pytest.raises(ConfigError, match="max_bytes is out of range"):
        models.choose(Limit(kind="max_bytes", value=8))
    assert models.made == []


def test_where_nothing_was_found_inside_the_closest_is_returned_and_says_so() -> None:
    """In the checkpoint everything costs more than alone, by an amount that no choice avoids."""
    models = Models(lambda choice: additive(choice) + (0.3 if sum(choice) < 3 else 0.25))
    models_table = in_baseline(additive)
    limit = Limit(kind="max_kl", value=0.2)
    found = choose_formats(
        limit,
        models_table,
        rounds=2,
        tolerance=0.25,
        make=models.make,
        measure=models.measure,
        refit=models.refit,
        uniform=models.uniform,
    )
    assert not found.is_inside(limit)


def test_a_mix_that_is_not_surely_closer_than_one_format_for_all_is_not_chosen() -> None:
    """10 bytes: by its costs, 4 bits for the first group gain a little. In half of the windows they lose as much."""
    models = Models(lambda choice: 1.0 - 0.001 * sum(choice))
    table = CostTable(sizes=SIZES, start=np.zeros(40), added=np.full((3, 2, 1), 0.3) - [[[0.0], [0.01]]] + 0 * SPREAD)
    limit = Limit(kind="max_bytes", value=10)
    plain = models.measure

    def measure(folder: str) -> Any:
        return plain(folder) + (0.01 * (-1.0) ** np.arange(40) if "1" in folder else 0.0)

    asked = {"rounds": 0, "tolerance": 0.25, "make": models.make, "refit": models.refit, "uniform": models.uniform}
    found = choose_formats(limit, table, measure=measure, **asked)  # type: ignore[arg-type]
    assert found.allocation.choice == (0, 0, 0) and found.allocation.gap is None
    assert len(models.made) == 2 and sum(models.made[0]) == 1
    assert found.predicted == pytest.approx(0.9) and found.measured == pytest.approx(1.0)
    sure = choose_formats(limit, table, measure=plain, **asked)  # type: ignore[arg-type]
    assert sum(sure.allocation.choice) == 1
