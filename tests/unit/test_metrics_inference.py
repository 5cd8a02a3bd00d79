"""Intervals, tests and the bootstrap, against hand-derived values, scipy and statsmodels.

Intervals for skewed and for bounded means, the tail of the KL, and what gates read of it.
"""

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from mlflow_compress.decide.gates import gate_values
from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics import compute_all, headline, unmet
from mlflow_compress.metrics.core.estimates import Mean, Resampled
from mlflow_compress.metrics.core.metric_inputs import MetricSettings
from mlflow_compress.metrics.kl_tail import mean_kl, shows_clipped
from mlflow_compress.metrics.stats import bootstrap as boot
from mlflow_compress.metrics.stats.intervals import (
    bounded_mean_interval,
    bounded_ratio_interval,
    paired_difference,
    share_interval,
    wilson,
    z_value,
)
from mlflow_compress.metrics.stats.significance import holm, larger_part_p, mcnemar_exact, mcnemar_mid_p, non_inferior
from mlflow_compress.records import MetricResult
from tests import metric_records
from tests.metric_records import QUICK
from tests.roundoff import of_sum

ROOT = 1.1e-12  # how far `paired_difference` may end from its root: its tolerance, and the roundoff of its function
BISECTED = 1e-9  # the same of `bounded_mean_interval`, after 40 bisections of a logit in [-40, 40]


@QUICK
@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.sampled_from([0.8, 0.95]))
def test_wilson_equals_statsmodels(counts, level):
    k, n = counts
    expected = proportion_confint(k, n, alpha=1 - level, method="wilson")
    assert wilson(k, n, level=level) == pytest.approx(expected, abs=of_sum(32))  # about 16 operations each


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
    z2 = z_value(0.95) ** 2
    low, high = wilson(k, n)
    assert 0.0 <= low <= k / n <= high <= 1.0
    for p in (low, high):
        # An error of p counts 2 |k/n - p| times on the left, and z²/n times on the right.
        rounding = of_sum(16) * (2 * abs(k / n - p) + z2 / n)
        assert (k / n - p) ** 2 == pytest.approx(z2 * p * (1 - p) / n, abs=rounding)


@QUICK
@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_a_share_has_the_exact_end_on_the_side_of_the_nearer_bound(counts):
    k, n = counts
    both, exact = share_interval(k, n), proportion_confint(k, n, method="beta")
    near = 0 if 2 * k < n else 1
    if min(k, n - k) > 0 and 2 * k != n:
        assert both[near] == pytest.approx(exact[near]) and both[1 - near] == wilson(k, n)[1 - near]
    else:
        assert both == wilson(k, n)
    assert share_interval(n - k, n) == pytest.approx((1 - both.high, 1 - both.low))


@pytest.mark.parametrize("n", [20, 60, 300, 1000])
def test_intervals_of_shares_cover_what_they_promise_by_enumeration(n):
    """Wilson's alone covers 90.5 % at 99.5 % of 20, and 88.7 % at 99.8 % of 60."""
    ends = [share_interval(k, n) for k in range(n + 1)]
    for share in (0.5, 0.8, 0.95, 0.98, 0.995, 0.998):
        held = [k for k, (low, high) in enumerate(ends) if low <= share <= high]
        assert scipy.stats.binom.pmf(held, n, share).sum() >= 0.94, share


def test_wilson_refuses_impossible_levels_and_counts():
    for level in (0.0, 1.0, 1.5, math.nan):
        with pytest.raises(ConfigError, match="confidence level"):
            wilson(1, 2, level=level)
    for k, n in ((0, 0), (3, 2), (-1, 5)):
        with pytest.raises(DataError):
            wilson(k, n)


def test_paired_difference_by_hand_and_impossible_counts_are_refused():
    # gained = lost = 0: the likelihood's q is 0 for d > 0, so n d² = z² d (1 - d), i.e. d = z²/(n + z²).
    z2 = z_value(0.95) ** 2
    assert paired_difference(0, 0, 100) == pytest.approx((-z2 / (100 + z2), z2 / (100 + z2)), abs=ROOT)
    with pytest.raises(DataError):
        paired_difference(3, 3, 5)


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
    accuracy = 1e-5  # a maximum is found within the root of the roundoff, 1.5e-8, and z moves 1/(2q + d) times as far
    assert low < (gained - lost) / n <= high
    if low > -1:
        assert statistic(low) == pytest.approx(z, abs=accuracy)
    if high < 1:
        assert statistic(high) == pytest.approx(-z, abs=accuracy)


@QUICK
@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 60))
def test_paired_difference_is_antisymmetric_and_holds_the_estimate(gained, lost, rest):
    n = gained + lost + rest
    low, high = paired_difference(gained, lost, n)
    assert -1 <= low <= (gained - lost) / n <= high <= 1
    assert paired_difference(lost, gained, n) == pytest.approx((-high, -low), abs=2 * ROOT)


@QUICK
@given(st.integers(0, 300), st.integers(0, 300))
def test_mcnemar_is_twice_the_smaller_tail(c2w, w2c):
    # Counted in whole numbers: the sequences of c2w + w2c fair coins with at most min(c2w, w2c) heads.
    n = c2w + w2c
    tail = Fraction(sum(math.comb(n, heads) for heads in range(min(c2w, w2c) + 1)), 2**n)
    assert mcnemar_exact(c2w, w2c) == pytest.approx(float(min(1, 2 * tail)), rel=1e-11)


def test_mcnemar_and_mid_p_by_hand():
    # 1 against 4: P(X <= 1) = (1 + 5)/32, twice that is 0.375.
    assert mcnemar_exact(1, 4) == 0.375
    with pytest.raises(DataError):
        mcnemar_exact(-1, 2)
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
    low, high = boot.bootstrap(x, resamples=20_000, seed=3, method=method)
    kind = {"bca": "BCa", "percentile": "percentile"}[method]
    theirs = scipy.stats.bootstrap(
        (x,), np.mean, n_resamples=20_000, method=kind, rng=np.random.default_rng(5)
    ).confidence_interval
    # Monte Carlo error of a 2.5 % quantile from 20,000 resamples is about 1 % of the interval's width.
    assert (low, high) == pytest.approx((theirs.low, theirs.high), abs=0.03 * (theirs.high - theirs.low))


@pytest.mark.parametrize("n", [300, 2_500])  # resampled 2,000 times in one block, and in two
def test_metrics_of_as_many_items_share_their_resamples(n, monkeypatch):
    draws, draw = [], boot._draw
    monkeypatch.setattr(boot, "_draw", lambda *given: draws.append(given) or draw(*given))
    first, second = (list(boot.resample_counts(n, 2000, seed=977)) for _ in range(2))
    assert len(draws) == len(first) == -(-2000 // min(boot._CHUNK // n, 2000))
    monkeypatch.setattr(boot, "_KEPT", 0)
    alone = list(boot.resample_counts(n, 2000, seed=977))
    assert len(draws) == 2 * len(first)  # too many to be kept
    for one in zip(first, second, alone, strict=True):
        assert all(np.array_equal(one[0], other) for other in one)


def test_distances_of_as_many_items_share_their_permutations(monkeypatch):
    seeds, rng = [], np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: seeds.append(seed) or rng(seed))
    rows, parts = rng(0).normal(size=(2, 4_500)), np.arange(4_500) % 3
    for values in rows:
        larger_part_p(values, parts, seed=977)
    assert len(seeds) == len(set(map(tuple, seeds))) > 0


def test_bca_equals_the_exhaustive_bootstrap():
    # All 4^4 resamples of four values give the exact distribution of the mean; the percentile interval follows it.
    x = np.array([0.0, 1.0, 3.0, 8.0])
    means = np.array([np.mean(r) for r in itertools.product(x, repeat=4)])
    low, high = boot.bootstrap(x, resamples=50_000, level=0.8, method="percentile")
    assert low == pytest.approx(np.quantile(means, 0.1), abs=0.26)
    assert high == pytest.approx(np.quantile(means, 0.9), abs=0.26)


def test_bootstrap_is_seeded_in_chunks_and_a_ratio_uses_both_columns():
    x = np.random.default_rng(0).normal(size=50)
    assert boot.bootstrap(x, seed=1) == boot.bootstrap(x, seed=1)
    assert boot.bootstrap(x, seed=1) != boot.bootstrap(x, seed=2)
    long = np.random.default_rng(0).normal(size=5000)  # 5000 x 2000 resamples are drawn in chunks
    low, high = boot.bootstrap(long)
    assert (high - low) == pytest.approx(2 * 1.96 / math.sqrt(5000), rel=0.1)
    denominator = np.random.default_rng(2).uniform(1, 2, size=400)
    # The numerator is three times the denominator, but for one unit: the ratio varies by that unit alone.
    numerator = 3 * denominator
    numerator[0] += 400.0
    low, high = boot.bootstrap(np.column_stack([numerator, denominator]), boot.ratio)
    assert (
        low == pytest.approx(3.0, rel=of_sum(2 * 400)) and 3.5 < high < 10.0
    )  # one unit adds 400/600, ten times as much at most


def test_bootstrap_states_where_no_interval_exists():
    assert boot.bootstrap([1.0]) is None
    assert boot.bootstrap([2.5] * 7) is None
    # The numerator is exactly three times the denominator: the ratio never varies although both columns do.
    denominator = np.random.default_rng(2).uniform(1, 2, size=400)
    assert boot.bootstrap(np.column_stack([3 * denominator, denominator]), boot.ratio) is None
    # One success in the denominator: 37 % of the resamples miss it, so no interval of the ratio exists.
    assert boot.bootstrap(np.column_stack([[1.0] * 5, [1.0, 0, 0, 0, 0]]), boot.ratio) is None
    assert boot.bootstrap(np.zeros((5, 2)), boot.ratio) is None
    with pytest.raises(DataError):
        boot.bootstrap([1.0, math.nan])
    with pytest.raises(DataError):
        boot.bootstrap([])
    with pytest.raises(ConfigError):
        boot.bootstrap([1.0, 2.0], resamples=5)
    with pytest.raises(ConfigError):
        boot.bootstrap([1.0, 2.0], level=1.0)


def test_cluster_bootstrap_is_wider_where_tokens_repeat():
    # 40 documents of 25 identical tokens hold 40 facts, not 1,000: the honest interval is about 5 times wider.
    values = np.repeat(np.random.default_rng(4).normal(size=40), 25)
    documents = np.repeat(np.arange(40), 25)
    naive = boot.bootstrap(values)
    honest = boot.bootstrap(boot.cluster_sums(values, documents), boot.ratio)
    assert (honest.high - honest.low) / (naive.high - naive.low) == pytest.approx(5.0, rel=0.15)
    assert boot.cluster_sums([1.0, 2.0, 4.0], [7, 3, 7]).tolist() == [[2.0, 1.0], [5.0, 2.0]]
    with pytest.raises(DataError):
        boot.cluster_sums([1.0, 2.0], [1])


def test_first_column_is_the_mean():
    assert boot.first_column(np.array([[1.0, 9.0], [2.0, 9.0]])).tolist() == [1.0, 2.0]


@pytest.mark.ci
def test_intervals_cover_at_their_level():
    # 1,500 simulated studies each; 95 % +- 3 standard errors (0.0056) of the simulation, and small-sample slack below.
    rng = np.random.default_rng(11)
    hits = {"wilson": 0, "tango": 0, "bca": 0}
    studies, p_gain, p_loss = 1500, 0.05, 0.10
    for _ in range(studies):
        low, high = wilson(int(rng.binomial(80, 0.12)), 80)
        hits["wilson"] += low <= 0.12 <= high
        gained, lost, _ = rng.multinomial(150, [p_gain, p_loss, 1 - p_gain - p_loss])
        low, high = paired_difference(int(gained), int(lost), 150)
        hits["tango"] += low <= p_gain - p_loss <= high
        low, high = boot.bootstrap(rng.exponential(size=100), resamples=1000)
        hits["bca"] += low <= 1.0 <= high
    shares = {name: count / studies for name, count in hits.items()}
    assert 0.93 <= shares["wilson"] <= 0.975
    assert 0.93 <= shares["tango"] <= 0.975
    assert 0.92 <= shares["bca"] <= 0.97


REAL = np.load(Path(__file__).parents[2] / "benchmarks" / "kl_per_item.npz")
FULL = metric_records.inputs(60)


# --- studentised bootstrap


def _slow(values, sizes, picks, level=0.95):
    """The same by its definition, resample by resample: means, standard errors and t of plain numpy."""
    r = values.sum() / sizes.sum()

    def error(a, b):
        e = a - a.sum() / b.sum() * b
        return math.sqrt((e * e).sum()) / b.sum()

    t = []
    for rows in picks:
        a, b = values[rows], sizes[rows]
        t.append((a.sum() / b.sum() - r) / error(a, b))
    tail = (1 - level) / 2
    lowest, highest = np.quantile(t, [0.6 * tail, 1 - tail])
    copies = [(b / size * a, b) for a, size in zip(values, sizes, strict=True) for b in [min(2 * size, sizes.max())]]
    a, b = max(copies, key=lambda copy: copy[0] - r * copy[1])
    more = np.append(values, a), np.append(sizes, b)
    return r - highest * error(values, sizes), more[0].sum() / more[1].sum() - lowest * error(*more)


@pytest.mark.parametrize("clusters", [False, True])
def test_studentised_equals_a_slow_implementation(clusters):
    rng = np.random.default_rng(3)
    values = rng.gamma(0.3, 0.1, size=60)
    sizes = rng.integers(5, 50, size=60).astype(float) if clusters else np.ones(60)
    picks = np.random.default_rng(7).integers(0, 60, size=(500, 60))
    expected = _slow(values, sizes, picks)
    found = boot.studentized_interval(values, sizes if clusters else None, resamples=500, seed=7)
    assert found == pytest.approx((max(expected[0], 0.0), expected[1]), rel=1e-9)


def test_studentised_of_every_resample_by_hand_and_its_settings_are_checked():
    # Of three values there are 27 resamples, 3 of them with one value only: t is infinite in 11 %, more than any tail.
    x = np.array([0.0, 1.0, 5.0])
    assert sum(len(set(p)) == 1 for p in itertools.product(x, repeat=3)) == 3
    assert boot.studentized_interval(x) is None
    assert boot.studentized_interval([1.0]) is None
    assert boot.studentized_interval([0.25] * 9) is None
    assert boot.studentized_interval([0.0] * 9) is None
    assert boot.studentized_interval([0.3, 0.6, 0.9], [1, 2, 3]) is None  # every group has the same mean
    for bad in ({"resamples": 5}, {"level": 1.0}):
        with pytest.raises(ConfigError):
            boot.studentized_interval([0.0, 1.0], **bad)
    with pytest.raises(DataError):
        boot.studentized_interval([0.0, math.nan])
    with pytest.raises(DataError):
        boot.studentized_interval([0.0, 1.0], [1.0])


@QUICK
@given(st.integers(0, 10_000), st.integers(-20, 20))
def test_studentised_is_equivariant_and_holds_the_mean(seed, exponent):
    scale = 2.0**exponent  # no bit of a product with it is rounded
    x = np.random.default_rng(seed).gamma(0.5, 1.0, size=40)
    low, high = boot.studentized_interval(x, resamples=400)
    assert 0.0 <= low <= x.mean() <= high
    assert boot.studentized_interval(scale * x, resamples=400) == (scale * low, scale * high)
    assert boot.studentized_interval(x, np.full(40, 1.0), resamples=400) == (low, high)


def test_studentised_reaches_further_up_than_bca_where_values_are_skewed():
    x = REAL["awq-4bit-g128/lettered"][:300].astype(float)
    assert boot.studentized_interval(x).high - x.mean() > 1.1 * (boot.bootstrap(x).high - x.mean())
    # Of many unskewed values all intervals are one: the tail alone differs, 2.17 standard errors instead of 1.96.
    y = np.random.default_rng(0).normal(1.0, 0.1, size=4000)
    low, high = boot.studentized_interval(y)
    assert (high - y.mean()) / (y.mean() - low) == pytest.approx(2.17 / 1.96, rel=0.06)


@pytest.mark.parametrize("name", ["awq-4bit-g128/pooled", "gptq-4bit-g128/lettered"])
def test_the_upper_end_covers_real_kl(name):
    population = REAL[name].astype(float)
    assert population.max() < 0.05 * population.sum()
    # 5 % are allowed; two standard errors of 400 draws are 2.2 %. `benchmarks/interval_coverage.py` has all samples.
    rng = np.random.default_rng(0)
    ends = [boot.studentized_interval(rng.choice(population, 200), resamples=600) for _ in range(400)]
    assert np.mean([end is not None and end.high < population.mean() for end in ends]) <= 0.05 + 0.022


# --- bounded mean


# What the saddlepoint's quantile of 2.5 % differs by from the exact one, towards the wide side: 0.6 % of the far end, and
# 2.3 % of the near end, where one value alone is away from it.
SADDLEPOINT = 0.006


def test_bounded_mean_of_shares_is_clopper_and_pearson_s_interval():
    """Of values at both ends, D_0 + ... over the ones and `high` has the distribution Beta(ones + 1, n - ones)."""
    for ones, n in ((0, 2), (0, 10), (0, 300), (1, 20), (3, 300), (150, 300), (19, 20), (20, 20)):
        low, high = bounded_mean_interval(np.repeat([2.0, 5.0], [n - ones, ones]), low=2.0, high=5.0)
        low, high = (low - 2.0) / 3.0, (high - 2.0) / 3.0
        below, above = proportion_confint(ones, n, method="beta")
        assert (low, high) == pytest.approx((below, above), rel=SADDLEPOINT, abs=1e-4), (ones, n)
        assert low <= below + BISECTED and high >= above - BISECTED, (ones, n)


def test_bounded_mean_is_the_quantile_of_randomly_weighted_means():
    x = np.minimum(np.random.default_rng(1).gamma(0.3, 0.5, size=40), 1.0)
    weights = np.random.default_rng(2).dirichlet(np.ones(41), size=40_000)
    low, high = bounded_mean_interval(x)
    # Two standard errors of a share of 2.5 % in 40,000 draws are 0.16 %, and the saddlepoint's error is below that.
    assert (weights @ np.append(x, 1.0) > high).mean() == pytest.approx(0.025, abs=0.003)
    assert (weights @ np.append(x, 0.0) < low).mean() == pytest.approx(0.025, abs=0.003)


@QUICK
@given(st.integers(0, 10_000), st.integers(1, 60))
def test_bounded_mean_needs_no_order_and_scales(seed, n):
    rng = np.random.default_rng(seed)
    x = np.minimum(rng.gamma(0.3, 1.0, size=n), 1.0)
    low, high = bounded_mean_interval(x)
    assert 0.0 <= low <= x.mean() <= high <= 1.0
    assert bounded_mean_interval(rng.permutation(x)) == pytest.approx((low, high), abs=2 * BISECTED)
    assert bounded_mean_interval(5 * x, high=5.0) == pytest.approx((5 * low, 5 * high), abs=10 * BISECTED)
    # More of the same narrows it, and another level widens it.
    assert bounded_mean_interval(np.tile(x, 5)).high <= high + 2 * BISECTED
    assert bounded_mean_interval(x, level=0.99).high >= high - 1e-9


def test_bounded_mean_refuses_what_it_cannot_bound():
    for bad in ({"high": 0.0}, {"high": math.inf}, {"low": math.nan}, {"level": 0.0}):
        with pytest.raises(ConfigError):
            bounded_mean_interval([0.5], **bad)
    with pytest.raises(DataError, match="Clip"):
        bounded_mean_interval([0.5, 1.5])
    with pytest.raises(DataError):
        bounded_mean_interval([])


@pytest.mark.parametrize("name", ["awq-4bit-g128/cloze", "gptq-4bit-g128/last_word", "gptq-3bit-g128/last_word"])
def test_the_clipped_bound_covers_where_one_item_holds_much_of_the_mean(name):
    population = np.minimum(REAL[name].astype(float), 1.0)
    rng = np.random.default_rng(2)
    misses = [bounded_mean_interval(rng.choice(population, 200)).high < population.mean() for _ in range(300)]
    assert np.mean(misses) <= 0.025 + 0.018  # two standard errors of 300 draws


# --- the tail of the KL


def test_shares_and_clipped_values_by_hand():
    keys = FULL.variant.option_distances.key_rows()
    # PIQA has 60 items; item 0 has 3 nats, item 1 has 1.5, all others 0.05; the lettered items have none.
    own = {"00000": 3.0, "00001": 1.5}
    kl = [own.get(item, 0.05) if task == "piqa" else 0.0 for task, item, *_ in keys]
    table = FULL.variant.option_distances
    columns = {name: table.table.column(name).to_pylist() for name in table.SCHEMA.names} | {"kl": kl}
    moved = replace(FULL, variant=replace(FULL.variant, option_distances=type(table).from_columns(columns)))
    found = {(r.name, r.task): r for r in compute_all(moved)}
    total = 4.5 + 58 * 0.05  # 7.4
    assert found["distance/kl_share_top_item_pct", "piqa"].value == pytest.approx(100 * 3 / total)
    assert found["distance/kl_share_top_item_pct", None].value == pytest.approx(100 * 3 / total)
    # The largest percent: one of 60 items, two of the 120 pooled ones.
    assert found["distance/kl_share_top_percent_pct", "piqa"].value == pytest.approx(100 * 3 / total)
    assert found["distance/kl_share_top_percent_pct", None].value == pytest.approx(100 * 4.5 / total)
    assert ("distance/kl_share_top_item_pct", "mmlu") not in found  # its total is 0
    assert found["distance/kl_clipped_mean", "piqa"].value == pytest.approx((2 + 58 * 0.05) / 60)
    above = found["distance/kl_above_clip_pct", "piqa"]
    assert (above.value, above.n) == (pytest.approx(100 * 2 / 60), 60)
    assert (above.low, above.high) == pytest.approx(tuple(100 * x for x in share_interval(2, 60)))
    assert found["distance/kl_items", None].value == 120


def test_no_share_of_nothing():
    same = metric_records.identical(FULL)
    assert unmet(same)["kl_concentration"] == "the KL of every item is 0: no item holds a share of it"
    found = headline(compute_all(same))
    assert "distance/kl_share_top_item_pct" not in found and found["distance/kl_mean"].value == 0.0
    assert 0.0 < found["distance/kl_mean"].high == found["distance/kl_clipped_mean"].high


def _kl_result(name, value, high, n):
    return MetricResult(name=f"distance/{name}", value=value, low=0.0, high=high, n=n)


@pytest.mark.parametrize("has_interval", [True, False])
def test_gates_are_given_the_bounded_values_whether_the_mean_has_an_interval_or_not(has_interval):
    results = (
        _kl_result("kl_mean", 0.02, 0.03 if has_interval else None, 300),
        _kl_result("kl_clipped_mean", 0.018, 0.04, 300),
        _kl_result("kl_above_clip_pct", 0.1, 0.5, 300),
        _kl_result("kl_items", 300.0, None, 300),
    )
    found = gate_values({r.name: r for r in results})
    assert shows_clipped({r.name: r for r in results}) != has_interval
    bounded = {"gate/kl_clipped_upper": 0.04, "gate/kl_above_clip_pct_upper": 0.5}
    assert found == {**bounded, "gate/kl_items": 300}


@pytest.mark.parametrize("largest", [0.02, 1.0, 1.0001, 40.0])
def test_a_mean_kl_has_the_clipped_mean_s_interval_where_no_item_is_above_the_clip(largest):
    """An item that was not seen may have 1 nat, as the largest that was: 1 - .025^(1/300) is 1.2 % of the items."""
    kl = np.r_[np.full(299, 0.02), largest]
    value, interval = mean_kl(kl, np.arange(300)).at(MetricSettings(), 1.0)
    assert value == kl.mean()
    if largest > 1.0:
        assert interval is None
        return
    assert interval == Mean(np.minimum(kl, 1.0), bounds=(0.0, 1.0)).at(MetricSettings(), 1.0)[1]
    assert interval[0] < value and interval[1] > 0.02 + 0.98 * 0.012


def test_each_direction_has_an_interval_by_itself():
    """Both means are from the same 220 items; of one of them an item is above the clip."""
    whole = metric_records.inputs(110)
    for odd in ("kl", "kl_reverse"):
        table = whole.variant.option_distances
        columns = {name: table.table.column(name).to_pylist() for name in table.SCHEMA.names}
        first = table.key_rows()[0][:2]
        small = np.linspace(0.04, 0.06, len(table))
        columns |= dict.fromkeys(("kl", "kl_reverse"), small)
        columns[odd] = [1.2 if key[:2] == first else x for key, x in zip(table.key_rows(), small, strict=True)]
        changed = replace(whole, variant=replace(whole.variant, option_distances=type(table).from_columns(columns)))
        found = headline(compute_all(changed))
        ends = {name: found[f"distance/{name}_mean"].high for name in ("kl", "kl_reverse")}
        assert ends.pop(odd) is None and None not in ends.values()


def test_gate_values_of_full_evidence():
    pooled = headline(compute_all(FULL))
    found = gate_values(pooled)
    assert set(found) == {
        "gate/kl_clipped_upper",
        "gate/kl_above_clip_pct_upper",
        "gate/kl_items",
        "gate/flips_pct_upper",
        "gate/accuracy_drop_pct_upper",
    }
    assert found["gate/kl_items"] == 120 == pooled["distance/kl_mean"].n
    assert found["gate/flips_pct_upper"] == pooled["distance/flips_pct"].high


def test_corpus_kl_uses_the_studentised_interval():
    result = headline(compute_all(FULL))["distance/corpus_kl_mean"]
    kl = FULL.variant.token_distances.column("kl")
    sums = boot.cluster_sums(kl, np.repeat(np.arange(24), 25))
    assert (result.low, result.high) == pytest.approx(boot.studentized_interval(sums[:, 0], sums[:, 1]))
    assert 0.0 < boot.UPPER_TAIL <= 1.0


# --- no interval of width 0


@pytest.mark.parametrize("size", [1, 3])
def test_values_that_are_all_alike_have_an_interval_that_allows_for_others_or_none(size):
    """2.5 % of samples of n groups show none of what 1 - 0.025^(1/n) of them are: Clopper and Pearson; Wilson's is near."""
    for n, value in itertools.product([2, 3, 5, 20, 60, 300], [0.0, 0.3, 1.0]):
        values, groups = np.full(n * size, value), np.repeat(np.arange(n), size)
        _, ends = Mean(values, groups=groups, bounds=(0.0, 1.0)).at(MetricSettings(), 1.0)
        assert (ends is None) == (size > 1 and n < 20)
        if ends is not None:
            unseen = 1 - 0.025 ** (1 / n)
            low, high = ends
            assert low <= value * (1 - 0.7 * unseen) and high >= value + 0.7 * unseen * (1 - value), (n, value)
        for estimate in (
            Mean(values, groups=groups),
            Mean(values, groups=groups, skewed=True),
            Resampled(values[:, None], boot.first_column, groups=groups),
            Resampled(values[:, None], boot.first_column, groups=groups, jackknife=True),
        ):
            assert estimate.at(MetricSettings(), 1.0)[1] is None, (n, value)


def test_a_ratio_of_bounded_values_allows_for_pairs_that_were_not_seen():
    """n pairs of (8, 4) in [0, 8]: if a share u = 1 - 0.025^(1/n) is (8, 0) instead, the ratio is 2 (1 + u/(1 - u)).

    The lower end is that of pairs (0, 8): (8 - 8u)/(4 - 4u + 8u).
    """
    for n, size in ((3, 1), (100, 1), (20, 2)):
        u = 1 - 0.025 ** (1 / n)
        low, high = bounded_ratio_interval(np.full(n, 8.0 * size), np.full(n, 4.0 * size), np.full(n, size), high=8.0)
        assert high == pytest.approx(2 * (1 + u / (1 - u)), rel=0.02)
        assert low == pytest.approx((8 - 8 * u) / (4 + 4 * u), rel=0.05)
    rng = np.random.default_rng(0)
    a, b = rng.uniform(0, 8, (2, 50))
    low, high = bounded_ratio_interval(a, b, high=8.0)
    assert bounded_mean_interval(a - high * b, low=-8 * high, high=8.0).high == pytest.approx(0.0, abs=1e-6)
    assert bounded_ratio_interval(b, a, high=8.0) == pytest.approx((1 / high, 1 / low))
    assert bounded_ratio_interval(a, np.zeros(50), high=8.0).high == np.inf
    # What the bootstrap says nothing of has this interval; what it does keeps its own.
    same = Resampled(np.column_stack([a, a]), boot.ratio, most=8.0)
    assert same.at(MetricSettings(), 1.0)[1] == bounded_ratio_interval(a, a, high=8.0)
    differs = np.column_stack([a, b])
    assert Resampled(differs, boot.ratio, most=8.0).at(MetricSettings(), 1.0) == Resampled(differs, boot.ratio).at(
        MetricSettings(), 1.0
    )


def test_gaffke_s_interval_of_unequal_groups_counts_as_many_as_the_weights_say():
    """One group of half of the items and 50 small ones: (1/2)^2 + 50 (1/100)^2 = 0.255, as 3.92 equal groups."""
    sizes = np.array([50.0] + [1.0] * 50)
    assert bounded_mean_interval(np.zeros(51), sizes).high == pytest.approx(1 - 0.025 ** (0.255 / 1), rel=0.02)
