"""The verdict's three words, derived by hand, and how often they are wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mlflow_compress.decide.direction import harm_of, harm_verdict
from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics import MetricSettings
from mlflow_compress.metrics.core.estimates import PairedDifference
from mlflow_compress.metrics.stats.intervals import paired_difference
from mlflow_compress.records import MetricResult


def found(c2w, w2c, n, margin=1.0):
    ends = paired_difference(w2c, c2w, n)
    return harm_verdict((w2c - c2w) / n, ends.low, ends.high, discordant=(c2w + w2c) / n, margin=margin)


@pytest.mark.parametrize(
    ("low", "high", "word", "text"),
    [
        (-0.08, -0.03, "worse", "worse"),
        (-0.009, -0.001, "worse", "worse, by less than 1 point"),
        (-0.009, 0.001, "no worse", "no worse than 1 point"),
        (0.001, 0.009, "no worse", "no worse than 1 point"),
        (-0.01, 0.001, "open", None),  # an end at the margin, or at 0, excludes neither
        (-0.02, 0.0, "open", None),
    ],
)
def test_each_word(low, high, word, text):
    verdict = harm_verdict((low + high) / 2, low, high, discordant=0.1, margin=1.0)
    assert verdict.word == word
    assert (verdict.items is not None) == (word == "open")
    assert text is None or verdict.text == text


def test_equal_models_are_open_until_the_interval_ends_within_the_margin():
    """Without a flip Tango's interval ends at -z²/(n + z²): within 1 % from n = 3.8415 x 99 = 380.3."""
    assert found(0, 0, 380).text == "open (about 390 items would settle it)"
    assert found(0, 0, 381).text == "no worse than 1 point"
    # With a margin of 0, nothing but a gain is no worse, and a change of 0 is no gain for any n.
    assert found(0, 0, 100_000, margin=0.0).text == "open (no number of items would settle the change seen)"


def test_items_by_hand():
    # d = -0.01 with M = 1: at the margin, so that harm alone can be shown, by Connor's formula with D = 0.09:
    # (1.95996 x 0.3 + 0.84162 x sqrt(0.0899))² / 0.0001 = (0.58799 + 0.25235)² x 10,000 = 7,061.6.
    assert harm_verdict(-0.01, -0.02, 0.001, discordant=0.09, margin=1.0).items == 7_100
    # d = 0 and M = 2: (1.95996 x sqrt(0.0896) + 0.84162 x 0.3)² / 0.0004 = (0.58668 + 0.25249)² x 2,500 = 1,760.5.
    assert harm_verdict(0.0, -0.03, 0.03, discordant=0.09, margin=2.0).items == 1_800


def test_items_in_groups_need_as_many_more_as_their_design_effect():
    """Copies of every item in groups of four: four times the items settle what the items without copies would."""
    rng = np.random.default_rng(0)
    change = rng.choice([-1, 0, 1], 1000, p=[0.05, 0.91, 0.04])

    def of(values, groups):
        difference = PairedDifference.of(values < 0, values > 0, groups)
        value, (low, high) = difference.at(MetricSettings(), 1.0)
        flips = MetricResult("distance/flips_pct", 100 * float((values != 0).mean()), n=len(values))
        delta = MetricResult("quality/accuracy_delta", value, low, high, n=len(values))
        return harm_of({r.name: r for r in (flips, delta)}, margin=0.5)

    alone, copied = of(change, None), of(np.repeat(change, 4), np.repeat(np.arange(1000), 4))
    assert alone.word == copied.word == "open"
    assert copied.items == pytest.approx(4 * alone.items, rel=0.12)  # each is rounded up to two digits; t for z


@pytest.mark.parametrize("margin", [-1.0, 101.0, math.nan])
def test_a_margin_is_0_to_100_points(margin):
    with pytest.raises(ConfigError, match="margin"):
        harm_verdict(0.0, -0.1, 0.1, discordant=0.1, margin=margin)


def simulated(change, discordant, n, margin, draws=1_500):
    """Verdicts on draws of n items with a true change and share of discordant items."""
    lost, gained = (discordant - change) / 2, (discordant + change) / 2
    counts = np.random.default_rng(7).multinomial(n, [lost, gained, 1 - lost - gained], size=draws)
    return [found(int(c2w), int(w2c), n, margin) for c2w, w2c, _ in counts]


@pytest.mark.parametrize("discordant", [0.03, 0.1, 0.3])
@pytest.mark.parametrize("n", [200, 2_000])
def test_the_words_are_seldom_wrong(discordant, n):
    at_margin = simulated(-0.02, discordant, n, 2.0)
    assert np.mean([verdict.within_margin for verdict in at_margin]) <= 0.04
    no_harm = simulated(0.0, discordant, n, 2.0)
    assert np.mean([verdict.worse for verdict in no_harm]) <= 0.04


@pytest.mark.parametrize(("change", "discordant"), [(0.0, 0.05), (-0.004, 0.09), (-0.015, 0.06)])
def test_the_number_of_items_settles_four_of_five(change, discordant):
    n = harm_verdict(change, -0.5, 0.5, discordant=discordant, margin=1.0).items
    settled = np.mean([verdict.word != "open" for verdict in simulated(change, discordant, n, 1.0)])
    assert 0.77 <= settled <= 0.86
