"""One check decided as early as the items allow: error level and saving by simulation."""

from pathlib import Path

import numpy as np
import pytest

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.stats.sequential import BoundedCheck, p_values, random_order


def gate(values, limit, seed=0, order=random_order):
    """Return the verdict of one check that is looked at after every item, and the number of items that it took."""
    x = np.asarray(values, dtype=float)[order(range(len(values)), seed=seed)]
    wrong, right = p_values(BoundedCheck(name="x", limit=limit), x, error=0.05, n_checks=1)
    passed, failed = wrong <= 0.9 * 0.05, right <= 0.1 * 0.05  # as `verdicts` has it for one check
    decided = np.flatnonzero(passed != failed)
    if not len(decided):
        return "undecided", len(x)
    return "pass" if passed[decided[0]] else "fail", int(decided[0]) + 1


def test_gate_by_hand():
    # No flips at all against a limit of 50 %. The bold bettor believes in ten items with a mean of 0.05, for which Kelly
    # bets (0.5 - 0.05)/(0.5 0.5) = 1.8: he stakes 0.9 of his capital, or 0.99 at most, on every item, and wins as much.
    # 0.95 x 1.9^5 = 23.5 >= 1/0.045 = 22.2 after 5 items, and 0.95 x 1.99^4 + 0.05 x 1.5^4 = 15.2 < 22.2 after 4.
    assert gate(np.zeros(50), 0.5) == ("pass", 5)
    assert gate(np.ones(50), 0.5)[0] == "fail"
    assert gate(np.zeros(3), 0.5) == ("undecided", 3)


def test_order_depends_on_ids_and_seed_alone():
    ids = [("task", f"{i:03d}") for i in range(200)]
    order = random_order(ids, seed=3)
    assert sorted(order) == list(range(200))
    assert [ids[i] for i in order] == [ids[::-1][i] for i in random_order(ids[::-1], seed=3)]
    assert random_order(ids, seed=4).tolist() != order.tolist()
    # The first items of a longer list keep their places: a gate may be asked while items come in.
    prefix = [ids[i] for i in order[:50]]
    assert random_order(prefix, seed=3).tolist() == list(range(50))
    # Random: the rank of an item says nothing of its place in the file, |rho| < 3/sqrt(200).
    assert abs(np.corrcoef(order, np.arange(200))[0, 1]) < 0.22


def test_ids_are_checked():
    with pytest.raises(DataError, match="share an id"):
        random_order(["a", "b", "a"])
    with pytest.raises(DataError, match="at least one item"):
        random_order([])


LIMIT, ITEMS, RUNS = 0.05, 2000, 400


def _flips(rng, truth):
    return rng.random(ITEMS) < truth


def _kl(rng, truth):
    # Most answers hardly move and a few move much: gamma with shape 0.3, clipped at 1 nat as the gate needs it.
    return np.minimum(rng.gamma(0.3, truth / 0.3, size=ITEMS), 1.0)


@pytest.mark.parametrize(
    "truth", [*(pytest.param(t, marks=[pytest.mark.slow]) for t in (0.01, 0.03, 0.07, 0.12)), 0.05]
)
@pytest.mark.parametrize(("name", "draw"), [("flips", _flips), ("KL", _kl)])
def test_error_rate_and_saving_are_what_the_readme_says(name, draw, truth):
    rng = np.random.default_rng(round(1000 * truth))
    decisions = [gate(draw(rng, truth), LIMIT, seed=run) for run in range(RUNS)]
    passed, failed = (np.mean([d[0] == verdict for d in decisions]) for verdict in ("pass", "fail"))
    saved = 1 - np.mean([n for _, n in decisions]) / ITEMS
    # At most 5 % of the runs may be wrong, however often one looks; three standard errors of 400 runs are 3.3 %. The
    # clipped mean lies below the true one, so that a failed gate is right about the unclipped mean too.
    if truth <= LIMIT:
        assert failed <= 0.05 + 0.033
    if truth >= LIMIT:
        assert passed <= 0.05 + 0.033
    if truth in (0.01, 0.12):
        assert max(passed, failed) > 0.99 and saved > 0.85
    shown = f"{truth:.2f} nats" if name == "KL" else f"{100 * truth:.0f} %"
    _assert_on_the_page(f"{name} {shown}", passed, failed, saved)


def _assert_on_the_page(what, passed, failed, saved):
    row = f"| {what} | {100 * passed:.0f} % | {100 * failed:.0f} % | {100 * saved:.0f} % |"
    assert row in (Path(__file__).parents[2] / "docs" / "how-to" / "decide-early.md").read_text(encoding="utf-8"), row


@pytest.mark.ci
@pytest.mark.parametrize(
    ("what", "first", "rest", "truth"),
    [
        # Ten categories of 200 items; the first hardly flips, or flips most, and the mean of all is the truth.
        ("flips 7 %, sorted by category: first those with 0.5 %", 0.005, (0.07 - 0.1 * 0.005) / 0.9, 0.07),
        ("flips 3 %, sorted by category: first those with 21 %", 0.21, (0.03 - 0.1 * 0.21) / 0.9, 0.03),
        ("flips 5 %, sorted by category: all in the last", 0.0, None, 0.05),
    ],
)
def test_items_sorted_by_category_decide_no_worse_than_shuffled_ones(what, first, rest, truth):
    rates = np.repeat([first] + [rest] * 9, 200) if rest is not None else np.repeat([0.0] * 9 + [0.5], 200)
    assert rates.mean() == pytest.approx(truth)
    rng = np.random.default_rng(0)
    draws = [rng.random(ITEMS) < rates for _ in range(RUNS)]

    def shares(order):
        decisions = [gate(x, LIMIT, seed=run, order=order) for run, x in enumerate(draws)]
        shown = [np.mean([d[0] == verdict for d in decisions]) for verdict in ("pass", "fail")]
        return *shown, 1 - np.mean([n for _, n in decisions]) / ITEMS

    passed, failed, saved = shares(random_order)
    assert (failed if truth < LIMIT else passed) <= 0.05 + 0.033
    _assert_on_the_page(what, passed, failed, saved)
    # What the gate must not do: believe the order of the file.
    believed = shares(lambda ids, seed: np.arange(len(ids)))
    assert (believed[1] if truth < LIMIT else believed[0]) > 0.5
