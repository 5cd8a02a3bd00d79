"""The choice of formats on models whose KL is a formula."""

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


def in_baseline(kl: Kl) -> CostTable:
    """Return the costs of one group at a time."""
    alone = [[kl(tuple(0 if g == i else 1 for i in range(3))) if f == 0 else 0.0 for f in range(2)] for g in range(3)]
    return CostTable(sizes=SIZES, kl=np.array(alone)[:, :, None] * SPREAD)


class Models:
    """Makes and measures choices, and counts."""

    def __init__(self, kl: Kl) -> None:
        self.kl = kl
        self.made: list[tuple[int, ...]] = []

    def make(self, allocation: Allocation, limit: Limit) -> tuple[Any, str]:
        self.made.append(allocation.choice)
        return None, "".join(map(str, allocation.choice))

    def measure(self, folder: str) -> Any:
        return self.kl(tuple(map(int, folder))) * SPREAD

    def uniform(self, name: str) -> Any:
        return self.kl((SIZES.formats.index(name),) * 3) * SPREAD

    def choose(self, limit: Limit, rounds: int = 2, table: CostTable | None = None) -> Choice:
        return choose_formats(
            limit,
            table or in_baseline(self.kl),
            make=self.make,
            measure=self.measure,
            uniform=self.uniform,
            rounds=rounds,
        )


def test_the_programme_s_choice_is_the_only_checkpoint_of_a_budget() -> None:
    models = Models(additive)
    found = models.choose(Limit(kind="max_bytes", value=10))
    assert found.allocation.choice == (1, 0, 0) and models.made == [(1, 0, 0)]
    assert found.predicted == pytest.approx(found.measured) == pytest.approx(0.5)


def test_the_smallest_variant_has_its_upper_end_within_the_limit() -> None:
    """Exactly at the limit, the mean keeps to it and the upper end of its interval does not."""
    limit, models = Limit(kind="max_kl", value=0.5), Models(additive)
    found = models.choose(limit)
    assert found.high <= 0.5 and models.made == [(1, 0, 0), found.allocation.choice]
    assert found.allocation.n_bytes == 11


def test_a_limit_that_the_checkpoint_misses_is_lowered_by_as_much() -> None:
    """Together everything costs twice what it costs alone: 1.0 for a promised 0.5, so the next may promise 0.39."""
    models = Models(lambda choice: 2 * additive(choice))
    limit = Limit(kind="max_kl", value=0.8)
    assert models.choose(limit, table=in_baseline(additive)).measured == pytest.approx(0.6)
    assert models.made == [(1, 0, 0), (1, 0, 1)]


def test_one_that_nothing_keeps_to_ends_with_the_closest_within_its_rounds() -> None:
    models = Models(lambda choice: additive(choice) + (0.3 if sum(choice) < 3 else 0.25))
    limit = Limit(kind="max_kl", value=0.2)
    found = models.choose(limit, rounds=1, table=in_baseline(additive))
    assert found.high > 0.2 and len(models.made) == 2
    assert found.high == min(models.measure("".join(map(str, choice))).mean() for choice in models.made) + (
        found.high - found.measured
    )


def test_a_limit_that_nothing_keeps_to_is_refused() -> None:
    models = Models(lambda choice: 1.0 + additive(choice))
    assert in_baseline(models.kl).costs.min() == 0.0
    with pytest.raises(ConfigError, match="max_bytes is out of range"):
        models.choose(Limit(kind="max_bytes", value=8))
    assert models.made == []


def test_a_mix_that_is_not_surely_closer_than_one_format_for_all_is_not_chosen() -> None:
    """10 bytes: by its costs, 4 bits for the first group gain a little. In half of the windows they lose as much."""
    models = Models(lambda choice: 1.0 - 0.001 * sum(choice))
    table = CostTable(sizes=SIZES, kl=np.full((3, 2, 1), 0.3) - [[[0.0], [0.01]]] + 0 * SPREAD)
    limit, plain = Limit(kind="max_bytes", value=10), models.measure
    models.measure = lambda folder: plain(folder) + (0.01 * (-1.0) ** np.arange(40) if "1" in folder else 0.0)  # type: ignore[method-assign]
    found = models.choose(limit, table=table)
    assert found.allocation.choice == (0, 0, 0) and found.allocation.gap is None
    assert len(models.made) == 2 and sum(models.made[0]) == 1
    assert found.measured == pytest.approx(1.0)
    models.measure = plain  # type: ignore[method-assign]
    assert sum(models.choose(limit, table=table).allocation.choice) == 1
