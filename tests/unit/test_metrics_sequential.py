"""Confidence sequences and the sequential gate: error level and saving by simulation."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics.intervals import wilson
from mlflow_compress.metrics.sequential import confidence_sequence, sequential_gate


def test_first_bet_by_hand():
    # One item x = 1, alpha = 0.5: bets before any data use variance 1/4 and t = 1, sqrt(2 ln 4/(ln 2/4)) = 4, capped at
    # 0.5/m. Against m the capital is 1 + 0.5/m (1 - m), halved: m is left out where (0.5 + 0.5/m)/2 >= 2, m <= 1/7.
    s = confidence_sequence([1.0], alpha=0.5, grid=700)
    assert s.low[0] == pytest.approx(1 / 7, abs=2 / 700)
    assert s.high[0] == 1.0


def test_bounds_never_widen_and_shrink_to_the_mean():
    x = np.random.default_rng(0).random(3000) < 0.1
    s = confidence_sequence(x)
    assert (np.diff(s.low) >= 0).all() and (np.diff(s.high) <= 0).all()
    assert s.low[-1] < 0.1 < s.high[-1]
    low, high = wilson(int(x.sum()), 3000)
    assert s.high[-1] - s.low[-1] < 2.2 * (high - low)  # what looking after every item costs


def test_blocks_do_not_matter_and_the_scale_is_free(monkeypatch):
    x = np.random.default_rng(1).random(200)
    whole = confidence_sequence(x, grid=100)
    monkeypatch.setattr("mlflow_compress.metrics.sequential._BLOCK", 700)
    pieces = confidence_sequence(x, grid=100)
    np.testing.assert_allclose(whole.low, pieces.low)
    np.testing.assert_allclose(whole.high, pieces.high)
    scaled = confidence_sequence(5 * x, upper=5.0, grid=100)
    np.testing.assert_allclose(scaled.high, 5 * whole.high)


def test_mirrored_data_mirror_the_bounds():
    x = np.random.default_rng(2).random(150) < 0.2
    a, b = confidence_sequence(x, grid=200), confidence_sequence(~x, grid=200)
    np.testing.assert_allclose(a.low, 1 - b.high, atol=1e-9)


def test_contradicting_data_keep_the_last_interval():
    # 400 ones and then 4,000 zeros are no random order; every candidate mean dies and the last interval stands.
    s = confidence_sequence([1.0] * 400 + [0.0] * 4000, alpha=0.5, grid=50)
    assert np.isfinite(s.low).all() and (s.low <= s.high).all()


def test_gate_by_hand():
    # No flips at all against a limit of 50 %: each bet is 0.5/0.5 = 1 (capped), the capital grows by 1 + 0.5 an item;
    # 1.5^8 = 25.6 >= 20 after 8 items.
    assert sequential_gate(np.zeros(50), 0.5) == sequential_gate([0] * 50, 0.5)
    assert sequential_gate(np.zeros(50), 0.5).n_used == 8
    assert sequential_gate(np.ones(50), 0.5).verdict == "fail"
    assert sequential_gate(np.zeros(3), 0.5).verdict == "undecided"
    assert sequential_gate(np.zeros(3), 0.5).n_used == 3


@pytest.mark.parametrize(
    "bad", [{"limit": 0.0}, {"limit": 1.0}, {"limit": 0.1, "alpha": 0.0}, {"limit": 0.1, "upper": math.inf}]
)
def test_settings_are_checked(bad):
    with pytest.raises(ConfigError):
        sequential_gate([0.0, 1.0], **bad)


def test_values_are_checked():
    with pytest.raises(DataError, match=r"Values must lie in \[0, 1.0\]"):
        confidence_sequence([0.5, 1.5])
    with pytest.raises(DataError):
        confidence_sequence([])
    with pytest.raises(ConfigError):
        confidence_sequence([0.5], grid=2)


LIMIT, ITEMS, RUNS = 0.05, 2000, 400


def _flips(rng, truth):
    return rng.random(ITEMS) < truth


def _kl(rng, truth):
    # Most answers hardly move and a few move much: gamma with shape 0.3, clipped at 1 nat as the gate needs it.
    return np.minimum(rng.gamma(0.3, truth / 0.3, size=ITEMS), 1.0)


@pytest.mark.parametrize("truth", [0.01, 0.03, 0.05, 0.07, 0.12])
@pytest.mark.parametrize(("name", "draw"), [("flips", _flips), ("KL", _kl)])
def test_error_rate_and_saving_are_what_the_readme_says(name, draw, truth):
    rng = np.random.default_rng(round(1000 * truth))
    decisions = [sequential_gate(draw(rng, truth), LIMIT) for _ in range(RUNS)]
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
    shown = f"{truth:.2f} nat" if name == "KL" else f"{100 * truth:.0f} %"
    row = f"| {name} {shown} | {100 * passed:.0f} % | {100 * failed:.0f} % | {100 * saved:.0f} % |"
    assert row in (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8"), row


def test_sequences_cover_at_every_look():
    rng = np.random.default_rng(9)
    misses = 0
    for _ in range(300):
        # KL-like values clipped at 1: the sequence is about the clipped mean, 0.2 (1 - e^-5).
        x = np.minimum(rng.exponential(0.2, size=500), 1.0)
        s = confidence_sequence(x, grid=200)
        misses += bool(((s.low > 0.2 * (1 - math.exp(-5))) | (s.high < 0.2 * (1 - math.exp(-5)))).any())
    assert misses / 300 <= 0.05 + 0.038
