"""Estimates of costs by hand, and the table that measures only what is chosen."""

from collections.abc import Sequence

import numpy as np
import pytest

from mlflow_compress.decide.cost_table import (
    Limit,
    StoredSizes,
    estimated_table,
    fisher_cost,
    rank_correlation,
)

SIZES = StoredSizes(
    groups=("a", "b", "c"),
    formats=("x:3", "x:4", "x:8", "none"),
    layers=np.array([[300, 400, 800, 1600]] * 3),
    base=4800,
    rest=10,
    weights=2400,
)
TRUTH = np.array([[0.9, 0.3, 0.01, 0.0], [0.3, 0.1, 0.003, 0.0], [0.06, 0.02, 0.0006, 0.0]])
LIMIT = Limit(kind="bits_per_weight", value=3.7)  # 1,110 bytes: 300 + 400 + 400


class Measure:
    """Gives true costs, window by window, and counts the swaps."""

    def __init__(self) -> None:
        self.cells: list[tuple[int, int]] = []

    def __call__(self, column: int, groups: Sequence[int]) -> np.ndarray:  # type: ignore[type-arg]
        self.cells += [(group, column) for group in groups]
        return TRUTH[list(groups), column][:, None] * np.array([0.5, 1.5])


def test_fisher_by_hand() -> None:
    """Token 1: 2² x 0.5² + 1² x 1² = 2. Token 2: 3² x 1² = 9. Half of 11, over 2 scored tokens: 2.75."""
    assert fisher_cost([[2, 1], [3, 0]], [[0.5, -1], [-1, 7]], 2) == 2.75


def test_fisher_is_the_kl_to_second_order_where_the_layer_is_the_logits() -> None:
    """A layer whose outputs are the logits: the KL's second order is half of the variance of the error under p.

    The diagonal is sum p (1 - p) e²; for an error of one logit alone the variance is the same.
    """
    rng = np.random.default_rng(0)
    logits = rng.normal(size=4)
    p = np.exp(logits) / np.exp(logits).sum()
    error = np.array([0.02, 0, 0, 0])
    moved = logits + error
    kl = float((p * (np.log(p) - moved + np.log(np.exp(moved).sum()))).sum())
    drawn = rng.choice(4, size=200_000, p=p)
    gradients = np.eye(4)[drawn] - p
    found = fisher_cost(gradients, np.broadcast_to(error, gradients.shape), len(drawn))
    assert found == pytest.approx(kl, rel=0.02)


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 4, 3], [1, 10, 100, 1000]) == pytest.approx(0.8)
    assert rank_correlation([1, 2], [1, 2]) is None and rank_correlation([1, 1, 1], [1, 2, 3]) is None


def test_what_is_chosen_is_measured_and_the_choice_is_that_of_all_measurements() -> None:
    """Two of the three groups may have 4 bits: a and b gain most."""
    measure = Measure()
    table, found = estimated_table(TRUTH * [[0.7], [1.2], [2.0]], [LIMIT], SIZES, measure, n_windows=2, known=[3])
    choice = table.solved(LIMIT).choice
    assert choice == (1, 1, 0)
    assert found.measured[[0, 1, 2], choice].all() and found.possible == 9
    assert sorted(measure.cells) == sorted(zip(*np.nonzero(found.measured), strict=True))
    assert len(measure.cells) == 3
    assert np.allclose(table.costs[found.measured], TRUTH[found.measured]) and (table.costs[:, 3] == 0).all()


def test_estimates_are_measured_where_they_choose_or_break_a_limit_and_no_more_often_than_asked() -> None:
    """By the estimate a needs no bits. It is measured because it was chosen, and then gets them."""
    measure = Measure()
    table, found = estimated_table(TRUTH * [[1e-3], [1], [1]], [LIMIT], SIZES, measure, n_windows=2, known=[3])
    assert (0, 0) in measure.cells and table.solved(LIMIT).choice == (1, 1, 0)
    assert found.rank_correlation is not None and int(found.measured.sum()) == len(set(measure.cells))
    measure = Measure()
    limit = Limit(kind="bits_per_weight", value=3.0)
    table, found = estimated_table(TRUTH, [limit], SIZES, measure, n_windows=2, known=[3], most=2)
    assert measure.cells == [(0, 0), (1, 0)] and found.measured.sum() == 2
    assert np.allclose(table.costs, TRUTH)
    assert found.rank_correlation is None
    # The estimates say that even 8 bits cost too much. They are measured before anything is refused.
    measure = Measure()
    limit = Limit(kind="max_kl", value=0.05)
    three = StoredSizes(
        groups=SIZES.groups, formats=SIZES.formats[:3], layers=SIZES.layers[:, :3], base=4800, rest=10, weights=2400
    )
    table, _ = estimated_table(TRUTH[:, :3] * 100, [limit], three, measure, n_windows=2)
    assert table.solved(limit).cost <= 0.05 and {(0, 2), (1, 2), (2, 2)} <= set(measure.cells)
