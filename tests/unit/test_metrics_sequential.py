"""Confidence sequences and the sequential gate: error level and saving by simulation."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics.stats.intervals import wilson
from mlflow_compress.metrics.stats.sequential import confidence_sequence, random_order, sequential_gate


def sequence(values, **options):
    return confidence_sequence(values, range(len(values)), **options)


def gate(values, limit, **options):
    return sequential_gate(values, range(len(values)), limit, **options)


def test_first_bet_by_hand():
    # One item x = 1, alpha = 0.5: bets before any data use variance 1/4 and t = 1, sqrt(2 ln 4/(ln 2/4)) = 4, capped at
    # 0.5/m. Against m the capital is 1 + 0.5/m (1 - m), halved: m is left out where (0.5 + 0.5/m)/2 >= 2, m <= 1/7.
    s = sequence([1.0], alpha=0.5, grid=700)
    assert s.low[0] == pytest.approx(1 / 7, abs=2 / 700)
    assert s.high[0] == 1.0


def test_bounds_never_widen_and_shrink_to_the_mean():
    x = np.random.default_rng(0).random(3000) < 0.1
    s = sequence(x)
    assert (np.diff(s.low) >= 0).all() and (np.diff(s.high) <= 0).all()
    assert s.low[-1] < 0.1 < s.high[-1]
    low, high = wilson(int(x.sum()), 3000)
    assert s.high[-1] - s.low[-1] < 2.2 * (high - low)  # what looking after every item costs


def test_blocks_do_not_matter_and_the_scale_is_free(monkeypatch):
    x = np.random.default_rng(1).random(200)
    whole = sequence(x, grid=100)
    monkeypatch.setattr("mlflow_compress.metrics.stats.sequential._BLOCK", 700)
    pieces = sequence(x, grid=100)
    np.testing.assert_allclose(whole.low, pieces.low)
    np.testing.assert_allclose(whole.high, pieces.high)
    scaled = sequence(5 * x, upper=5.0, grid=100)
    np.testing.assert_allclose(scaled.high, 5 * whole.high)


def test_mirrored_data_mirror_the_bounds():
    x = np.random.default_rng(2).random(150) < 0.2
    a, b = sequence(x, grid=200), sequence(~x, grid=200)
    np.testing.assert_allclose(a.low, 1 - b.high, atol=1e-9)


def test_contradicting_data_keep_the_last_interval(monkeypatch):
    # 400 ones and then 4,000 zeros are no random order; every candidate mean dies and the last interval stands.
    monkeypatch.setattr("mlflow_compress.metrics.stats.sequential.random_order", lambda ids, seed: np.arange(len(ids)))
    s = sequence([1.0] * 400 + [0.0] * 4000, alpha=0.5, grid=50)
    assert np.isfinite(s.low).all() and (s.low <= s.high).all()


def test_gate_by_hand():
    # No flips at all against a limit of 50 %. The bold bettor believes in ten items with a mean of 0.05, for which Kelly
    # bets (0.5 - 0.05)/(0.5 0.5) = 1.8: he stakes 0.9 of his capital, or 0.99 at most, on every item, and wins as much.
    # 0.95 x 1.9^5 = 23.5 >= 20 after 5 items, and 0.95 x 1.99^4 + 0.05 x 1.5^4 = 15.2 < 20 after 4.
    assert gate(np.zeros(50), 0.5) == gate([0] * 50, 0.5)
    assert gate(np.zeros(50), 0.5).n_used == 5
    assert gate(np.ones(50), 0.5).verdict == "fail"
    assert gate(np.zeros(3), 0.5).verdict == "undecided"
    assert gate(np.zeros(3), 0.5).n_used == 3


@pytest.mark.parametrize(
    "bad", [{"limit": 0.0}, {"limit": 1.0}, {"limit": 0.1, "alpha": 0.0}, {"limit": 0.1, "upper": math.inf}]
)
def test_settings_are_checked(bad):
    with pytest.raises(ConfigError):
        gate([0.0, 1.0], **bad)


def test_values_are_checked():
    with pytest.raises(DataError, match=r"Values must lie in \[0, 1.0\]"):
        sequence([0.5, 1.5])
    with pytest.raises(DataError):
        sequence([])
    with pytest.raises(ConfigError):
        sequence([0.5], grid=2)


def test_order_depends_on_ids_and_seed_alone():
    ids = [("task", f"{i:03d}") for i in range(200)]
    order = random_order(ids, seed=3)
    assert sorted(order) == list(range(200))
    turned = random_order(ids[::-1], seed=3)
    assert [ids[i] for i in order] == [ids[::-1][i] for i in turned]
    assert random_order(ids, seed=4).tolist() != order.tolist()
    # The first items of a longer list keep their places: a gate may be asked while items come in.
    prefix = [ids[i] for i in order[:50]]
    assert random_order(prefix, seed=3).tolist() == list(range(50))
    # Random: the rank of an item says nothing of its place in the file, |rho| < 3/sqrt(200).
    assert abs(np.corrcoef(order, np.arange(200))[0, 1]) < 0.22


@pytest.mark.parametrize("decide", [sequential_gate, lambda x, ids, limit: confidence_sequence(x, ids)])
def test_ids_are_checked(decide):
    with pytest.raises(DataError, match="share an id"):
        decide([0.0, 1.0, 0.0], ["a", "b", "a"], 0.5)
    with pytest.raises(DataError, match="one length"):
        decide([0.0, 1.0, 0.0], ["a", "b"], 0.5)
    with pytest.raises(TypeError):
        decide([0.0, 1.0, 0.0], 0.5)


def test_the_order_of_the_input_does_not_matter():
    rng = np.random.default_rng(5)
    x, ids = np.sort(rng.random(300) < 0.3), np.array([f"q{i}" for i in range(300)])
    moved = rng.permutation(300)
    assert sequential_gate(x, ids, 0.2) == sequential_gate(x[moved], ids[moved], 0.2)
    a, b = confidence_sequence(x, ids, grid=50), confidence_sequence(x[moved], ids[moved], grid=50)
    np.testing.assert_array_equal(a.high, b.high)


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
    passed, failed = (np.mean([d.verdict == verdict for d in decisions]) for verdict in ("pass", "fail"))
    saved = 1 - np.mean([d.n_used for d in decisions]) / ITEMS
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


@pytest.mark.slow
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
def test_items_sorted_by_category_decide_no_worse_than_shuffled_ones(what, first, rest, truth, monkeypatch):
    rates = np.repeat([first] + [rest] * 9, 200) if rest is not None else np.repeat([0.0] * 9 + [0.5], 200)
    assert rates.mean() == pytest.approx(truth)
    rng = np.random.default_rng(0)
    draws = [rng.random(ITEMS) < rates for _ in range(RUNS)]

    def shares():
        decisions = [gate(x, LIMIT, seed=run) for run, x in enumerate(draws)]
        shown = [np.mean([d.verdict == verdict for d in decisions]) for verdict in ("pass", "fail")]
        return *shown, 1 - np.mean([d.n_used for d in decisions]) / ITEMS

    passed, failed, saved = shares()
    assert (failed if truth < LIMIT else passed) <= 0.05 + 0.033
    _assert_on_the_page(what, passed, failed, saved)
    # What the gate must not do: believe the order of the file.
    monkeypatch.setattr("mlflow_compress.metrics.stats.sequential.random_order", lambda ids, seed: np.arange(len(ids)))
    believed = shares()
    assert (believed[1] if truth < LIMIT else believed[0]) > 0.5


def test_sequences_cover_at_every_look():
    rng = np.random.default_rng(9)
    misses = 0
    for _ in range(300):
        # KL-like values clipped at 1: the sequence is about the clipped mean, 0.2 (1 - e^-5).
        x = np.minimum(rng.exponential(0.2, size=500), 1.0)
        s = sequence(x, grid=200)
        misses += bool(((s.low > 0.2 * (1 - math.exp(-5))) | (s.high < 0.2 * (1 - math.exp(-5)))).any())
    assert misses / 300 <= 0.05 + 0.038
