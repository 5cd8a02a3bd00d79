"""Intervals, tests and the bootstrap, against hand-derived values, scipy and statsmodels."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics.stats.bootstrap import bootstrap, cluster_sums, first_column, ratio
from mlflow_compress.metrics.stats.intervals import paired_difference, wilson, z_value
from mlflow_compress.metrics.stats.significance import holm, mcnemar_exact, mcnemar_mid_p, non_inferior
from tests.metric_records import QUICK


@QUICK
@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.sampled_from([0.8, 0.95]))
def test_wilson_equals_statsmodels(counts, level):
    k, n = counts
    expected = proportion_confint(k, n, alpha=1 - level, method="wilson")
    assert wilson(k, n, level=level) == pytest.approx(expected, abs=1e-12)


def test_wilson_by_hand():
    # k = 0: low = 0, high = z²/(n + z²); with z² = 3.8415 and n = 10: 3.8415/13.8415 = 0.27753.
    low, high = wilson(0, 10)
    assert low == 0.0
    assert high == pytest.approx(0.27753, abs=1e-5)
    assert wilson(10, 10) == pytest.approx((1 - high, 1.0))


@QUICK
@given(st.integers(1, 20_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_solves_its_definition(counts):
    # Both ends are the p at which k is z standard errors away: (k/n - p)² = z² p (1 - p)/n.
    k, n = counts
    low, high = wilson(k, n)
    assert 0.0 <= low <= k / n <= high <= 1.0
    for p in (low, high):
        assert (k / n - p) ** 2 == pytest.approx(z_value(0.95) ** 2 * p * (1 - p) / n, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("level", [0.0, 1.0, 1.5, math.nan])
def test_wilson_refuses_impossible_levels(level):
    with pytest.raises(ConfigError, match="confidence level"):
        wilson(1, 2, level=level)


@pytest.mark.parametrize(("k", "n"), [(0, 0), (3, 2), (-1, 5)])
def test_wilson_refuses_impossible_counts(k, n):
    with pytest.raises(DataError):
        wilson(k, n)


def test_paired_difference_with_no_change_by_hand():
    # gained = lost = 0: the likelihood's q is 0 for d > 0, so n d² = z² d (1 - d), i.e. d = z²/(n + z²).
    z2 = z_value(0.95) ** 2
    assert paired_difference(0, 0, 100) == pytest.approx((-z2 / (100 + z2), z2 / (100 + z2)), abs=1e-9)


@pytest.mark.parametrize(("gained", "lost", "n"), [(5, 2, 30), (0, 7, 40), (12, 12, 60), (3, 0, 10), (10, 0, 10)])
def test_paired_difference_solves_its_definition(gained, lost, n):
    # Independent: maximise the trinomial likelihood over q = P(lost) numerically instead of the closed form.
    def statistic(d: float) -> float:
        def loss(q: float) -> float:
            probabilities = (q + d, q, 1 - 2 * q - d)
            counts = (gained, lost, n - gained - lost)
            if min(probabilities) < -1e-12:
                return math.inf
            return -sum(c * math.log(max(p, 1e-300)) for c, p in zip(counts, probabilities, strict=True) if c)

        q = minimize_scalar(loss, bounds=(max(0.0, -d), (1 - d) / 2), method="bounded", options={"xatol": 1e-12}).x
        return (gained - lost - n * d) / math.sqrt(n * (2 * q + d * (1 - d)))

    low, high = paired_difference(gained, lost, n)
    z = z_value(0.95)
    assert low < (gained - lost) / n <= high
    if low > -1:
        assert statistic(low) == pytest.approx(z, abs=1e-3)
    if high < 1:
        assert statistic(high) == pytest.approx(-z, abs=1e-3)


@QUICK
@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 60))
def test_paired_difference_is_antisymmetric_and_holds_the_estimate(gained, lost, rest):
    n = gained + lost + rest
    low, high = paired_difference(gained, lost, n)
    assert -1 <= low <= (gained - lost) / n <= high <= 1
    assert paired_difference(lost, gained, n) == pytest.approx((-high, -low), abs=1e-9)


def test_paired_difference_refuses_impossible_counts():
    with pytest.raises(DataError):
        paired_difference(3, 3, 5)


@QUICK
@given(st.integers(0, 300), st.integers(0, 300))
def test_mcnemar_is_twice_the_smaller_tail(c2w, w2c):
    # Counted in whole numbers: the sequences of c2w + w2c fair coins with at most min(c2w, w2c) heads.
    n = c2w + w2c
    tail = Fraction(sum(math.comb(n, heads) for heads in range(min(c2w, w2c) + 1)), 2**n)
    assert mcnemar_exact(c2w, w2c) == pytest.approx(float(min(1, 2 * tail)), rel=1e-11)


def test_mcnemar_by_hand():
    # 1 against 4: P(X <= 1) = (1 + 5)/32, twice that is 0.375.
    assert mcnemar_exact(1, 4) == 0.375
    with pytest.raises(DataError):
        mcnemar_exact(-1, 2)


def test_mid_p_by_hand():
    # Fagerland et al., table 1: 1 against 7 of 8: (2 (1 + 8) - 8)/256 = 0.0391, where the exact test gives 0.0703.
    assert mcnemar_mid_p(1, 7) == mcnemar_mid_p(7, 1) == pytest.approx(10 / 256)
    assert mcnemar_exact(1, 7) == pytest.approx(18 / 256)
    assert mcnemar_mid_p(2, 2) == pytest.approx(1 - 6 / 32)  # equal counts: 1 - C(4, 2)/2^4/2
    assert mcnemar_mid_p(0, 0) == 1.0


@QUICK
@given(st.integers(0, 300), st.integers(0, 300))
def test_mid_p_is_twice_the_tail_less_what_was_observed(c2w, w2c):
    n, least = c2w + w2c, min(c2w, w2c)
    tail, observed = sum(math.comb(n, heads) for heads in range(least + 1)), math.comb(n, least)
    expected = Fraction(2 * tail - observed, 2**n) if c2w != w2c else 1 - Fraction(observed, 2 ** (n + 1))
    assert mcnemar_mid_p(c2w, w2c) == pytest.approx(float(expected) if n else 1.0, rel=1e-9)


def test_mid_p_agrees_with_the_interval_where_the_exact_test_does_not():
    """All tables with c2w <= w2c < 60 at four n: 7,320. An interval without 0 and a p of 0.05 or more contradict."""
    p_values = {(a, b): (mcnemar_exact(a, b), mcnemar_mid_p(a, b)) for b in range(60) for a in range(b + 1)}
    exact, mid = [], []
    for (lost, gained), (p_exact, p_mid) in p_values.items():
        for n in (120, 200, 500, 1000):
            excluded = paired_difference(gained, lost, n).low > 0
            exact += [p_exact] * ((p_exact < 0.05) != excluded)
            mid += [p_mid] * ((p_mid < 0.05) != excluded)
    assert (4 * len(p_values), len(exact), len(mid)) == (7320, 184, 24)
    assert min(mid) > 0.05 and max(mid) == pytest.approx(0.0625)  # 0 against 4


def test_holm_is_that_of_statsmodels():
    rng = np.random.default_rng(3)
    for n in (1, 2, 7, 40):
        values = np.round(rng.random(n) ** 3, 2)  # with ties
        np.testing.assert_array_equal(holm(values), multipletests(values, method="holm")[1])


@settings(QUICK)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_by_its_rule(values):
    # Reject at any level a the smallest p-values while p_(j) <= a/(m - j + 1): an adjusted value is the least such a.
    adjusted, m = holm(values), len(values)
    ordered = sorted(values)
    for value, found in zip(values, adjusted, strict=True):
        last = m - ordered[::-1].index(value)  # of equal p-values all must go
        needed = max((m - j) * ordered[j] for j in range(last))
        assert found == pytest.approx(min(needed, 1.0))
        assert value <= found + 1e-15


def test_holm_by_hand_and_bounds():
    # Sorted 0.01, 0.02, 0.04: 3 x 0.01 = 0.03; max(0.03, 2 x 0.02) = 0.04; max(0.04, 0.04) = 0.04.
    np.testing.assert_allclose(holm([0.04, 0.01, 0.02]), [0.04, 0.03, 0.04])
    with pytest.raises(DataError):
        holm([0.5, 1.2])


def test_non_inferiority_uses_the_bad_end():
    assert non_inferior(0.1, 1.9, margin=2.0, direction="lower")
    assert not non_inferior(0.1, 2.1, margin=2.0, direction="lower")
    assert non_inferior(-0.019, 0.01, margin=0.02, direction="higher")
    assert not non_inferior(-0.021, 0.5, margin=0.02, direction="higher")
    with pytest.raises(ConfigError):
        non_inferior(0, 1, margin=-0.1, direction="lower")
    with pytest.raises(DataError):
        non_inferior(1, 0, margin=0.1, direction="lower")


@pytest.mark.parametrize("method", ["bca", "percentile"])
def test_bootstrap_agrees_with_scipy(method):
    x = np.random.default_rng(1).exponential(size=200)
    low, high = bootstrap(x, resamples=20_000, seed=3, method=method)
    kind = {"bca": "BCa", "percentile": "percentile"}[method]
    theirs = scipy.stats.bootstrap(
        (x,), np.mean, n_resamples=20_000, method=kind, rng=np.random.default_rng(5)
    ).confidence_interval
    # Monte Carlo error of a 2.5 % quantile from 20,000 resamples is about 1 % of the interval's width.
    assert (low, high) == pytest.approx((theirs.low, theirs.high), abs=0.03 * (theirs.high - theirs.low))


def test_bca_equals_the_exhaustive_bootstrap():
    # All 4^4 resamples of four values give the exact distribution of the mean; the percentile interval follows it.
    x = np.array([0.0, 1.0, 3.0, 8.0])
    means = np.array([np.mean(r) for r in itertools.product(x, repeat=4)])
    low, high = bootstrap(x, resamples=50_000, level=0.8, method="percentile")
    assert low == pytest.approx(np.quantile(means, 0.1), abs=0.26)
    assert high == pytest.approx(np.quantile(means, 0.9), abs=0.26)


def test_bootstrap_is_seeded_and_chunks_do_not_matter():
    x = np.random.default_rng(0).normal(size=50)
    assert bootstrap(x, seed=1) == bootstrap(x, seed=1)
    assert bootstrap(x, seed=1) != bootstrap(x, seed=2)
    long = np.random.default_rng(0).normal(size=5000)  # 5000 x 2000 resamples are drawn in chunks
    low, high = bootstrap(long)
    assert (high - low) == pytest.approx(2 * 1.96 / math.sqrt(5000), rel=0.1)


def test_bootstrap_of_a_ratio_uses_both_columns():
    rng = np.random.default_rng(2)
    denominator = rng.uniform(1, 2, size=400)
    # The numerator is exactly three times the denominator, so the ratio never varies although both columns do.
    low, high = bootstrap(np.column_stack([3 * denominator, denominator]), ratio)
    assert (low, high) == pytest.approx((3.0, 3.0), abs=1e-12)


def test_bootstrap_states_where_no_interval_exists():
    assert bootstrap([1.0]) is None
    assert bootstrap([2.5] * 7) == (2.5, 2.5)
    # One success in the denominator: 37 % of the resamples miss it, so no interval of the ratio exists.
    assert bootstrap(np.column_stack([[1.0] * 5, [1.0, 0, 0, 0, 0]]), ratio) is None
    assert bootstrap(np.zeros((5, 2)), ratio) is None
    with pytest.raises(DataError):
        bootstrap([1.0, math.nan])
    with pytest.raises(DataError):
        bootstrap([])
    with pytest.raises(ConfigError):
        bootstrap([1.0, 2.0], resamples=5)
    with pytest.raises(ConfigError):
        bootstrap([1.0, 2.0], level=1.0)


def test_cluster_bootstrap_is_wider_where_tokens_repeat():
    # 40 documents of 25 identical tokens hold 40 facts, not 1,000: the honest interval is about 5 times wider.
    values = np.repeat(np.random.default_rng(4).normal(size=40), 25)
    documents = np.repeat(np.arange(40), 25)
    naive = bootstrap(values)
    honest = bootstrap(cluster_sums(values, documents), ratio)
    assert (honest.high - honest.low) / (naive.high - naive.low) == pytest.approx(5.0, rel=0.15)
    assert cluster_sums([1.0, 2.0, 4.0], [7, 3, 7]).tolist() == [[2.0, 1.0], [5.0, 2.0]]
    with pytest.raises(DataError):
        cluster_sums([1.0, 2.0], [1])


def test_first_column_is_the_mean():
    assert first_column(np.array([[1.0, 9.0], [2.0, 9.0]])).tolist() == [1.0, 2.0]


@pytest.mark.slow
@pytest.mark.ci
def test_intervals_cover_at_their_level():
    # 1,500 simulated studies each; 95 % +- 3 standard errors (0.0056) of the simulation, and small-sample slack below.
    rng = np.random.default_rng(11)
    hits = {"wilson": 0, "tango": 0, "bca": 0}
    studies, p_gain, p_loss = 1500, 0.05, 0.10
    for _ in range(studies):
        k = rng.binomial(80, 0.12)
        low, high = wilson(int(k), 80)
        hits["wilson"] += low <= 0.12 <= high
        gained, lost, _ = rng.multinomial(150, [p_gain, p_loss, 1 - p_gain - p_loss])
        low, high = paired_difference(int(gained), int(lost), 150)
        hits["tango"] += low <= p_gain - p_loss <= high
        low, high = bootstrap(rng.exponential(size=100), resamples=1000)
        hits["bca"] += low <= 1.0 <= high
    shares = {name: count / studies for name, count in hits.items()}
    assert 0.93 <= shares["wilson"] <= 0.975
    assert 0.93 <= shares["tango"] <= 0.975
    assert 0.92 <= shares["bca"] <= 0.97
