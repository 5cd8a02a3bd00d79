"""The integer programme of mixed precision: examples by hand, and every small case against all choices."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlflow_compress.decide.cost_table import closest_within, smallest_within
from mlflow_compress.errors import ConfigError, DataError

COSTS = [[8.0, 2.0, 0.0], [3.0, 1.0, 0.0], [1.0, 0.5, 0.0]]
SIZES = [[3, 4, 8], [3, 4, 8], [6, 8, 16]]


@pytest.mark.parametrize(
    ("budget", "choice", "cost"),
    [
        (12, (0, 0, 0), 12.0),  # everything small
        (13, (1, 0, 0), 6.0),  # one byte: 6 nats in the first group, 2 in the second
        (14, (1, 1, 0), 4.0),
        (16, (1, 1, 1), 3.5),  # two bytes of the third group bring 0.5; of the second, nothing yet
        (17, (1, 1, 1), 3.5),  # 8 bytes in the first group alone would cost 4: the largest format is not always best
        (18, (2, 1, 0), 2.0),
        (32, (2, 2, 2), 0.0),
    ],
)
def test_the_closest_within_a_budget(budget: int, choice: tuple[int, ...], cost: float) -> None:
    found = closest_within(COSTS, SIZES, max_bytes=budget)
    assert (found.choice, found.cost, found.gap) == (choice, cost, 0.0)
    assert found.n_bytes == sum(SIZES[i][j] for i, j in enumerate(choice)) <= budget


def test_the_smallest_within_a_cost_and_limits_that_cannot_be_met_name_the_range() -> None:
    assert smallest_within(COSTS, SIZES, max_cost=4.0).choice == (1, 1, 0)
    assert smallest_within(COSTS, SIZES, max_cost=3.99).choice == (1, 1, 1)
    assert smallest_within(COSTS, SIZES, max_cost=12.0).n_bytes == 12
    with pytest.raises(ConfigError, match=r"at least 12 bytes. Got: 11"):
        closest_within(COSTS, SIZES, max_bytes=11)
    with pytest.raises(ConfigError, match=r"at least 0.5. Got: 0.1"):
        smallest_within([[1.0, 0.5]], [[1, 2]], max_cost=0.1)


@pytest.mark.parametrize(
    ("costs", "sizes"), [([[1.0, 2.0]], [[1]]), ([[np.nan]], [[1]]), ([[1.0]], [[0]]), ([], []), ([1.0], [1])]
)
def test_broken_tables_are_refused(costs: Any, sizes: Any) -> None:
    with pytest.raises(DataError):
        closest_within(costs, sizes, max_bytes=10)


@st.composite
def tables(draw: st.DrawFn) -> tuple[Any, Any]:
    groups, formats = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    scale = 10.0 ** draw(st.integers(-7, 3))
    cost = st.integers(-3, 1000).map(lambda value: value * scale)
    rows = st.lists(cost, min_size=formats, max_size=formats)
    many = st.lists(st.integers(1, 60).map(lambda n: 16 * n), min_size=formats, max_size=formats)
    return (
        draw(st.lists(rows, min_size=groups, max_size=groups)),
        draw(st.lists(many, min_size=groups, max_size=groups)),
    )


@given(table=tables(), share=st.floats(0, 1))
@example(table=([[-1.0]], [[16]]), share=0.0)  # costs may be below 0, and so may their limit
@settings(max_examples=60)
def test_no_choice_is_better(table: tuple[Any, Any], share: float) -> None:
    costs, sizes = (np.array(part) for part in table)
    rows = np.arange(len(costs))
    every = [np.array(choice) for choice in itertools.product(range(costs.shape[1]), repeat=len(costs))]
    totals = [(float(costs[rows, c].sum()), int(sizes[rows, c].sum())) for c in every]
    low, high = min(n for _, n in totals), max(n for _, n in totals)
    budget = int(low + share * (high - low))
    found = closest_within(costs, sizes, max_bytes=budget)
    assert found.n_bytes <= budget
    assert found.cost == pytest.approx(
        min(c for c, n in totals if n <= budget), rel=1e-6, abs=1e-6 * np.abs(costs).max()
    )

    limit = min(c for c, _ in totals) + share * (max(c for c, _ in totals) - min(c for c, _ in totals))
    small = smallest_within(costs, sizes, max_cost=max(limit, float(costs.min(axis=1).sum())))
    assert small.cost <= limit + 1e-9 * np.abs(costs).max()
    assert small.n_bytes == min(n for c, n in totals if c <= limit + 1e-9 * np.abs(costs).max())


def test_hundreds_of_groups_are_solved_exactly() -> None:
    """Costs of one group are those of all: then the budget decides how many groups get the larger format."""
    n = 640
    found = closest_within([[8.0, 1.0, 0.1]] * n, [[3, 4, 8]] * n, max_bytes=3 * n + 100)
    assert found.n_bytes == 3 * n + 100 and found.cost == pytest.approx(8 * (n - 100) + 100) and found.gap == 0.0
