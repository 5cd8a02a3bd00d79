"""Items drawn from strata: how many of which, weighted estimates, what leads say of flips."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.core.estimates import Mean, PairedDifference, Proportion
from mlflow_compress.metrics.core.metric_inputs import MetricSettings
from mlflow_compress.metrics.stats.flip_model import FlipModel, forecast_flips, smallest_kl_to_change
from mlflow_compress.metrics.stats.stratified import (
    Design,
    Units,
    allocate,
    as_if_independent,
    lead_strata,
    weighted_mean,
)
from tests.roundoff import of_sum

SETTINGS = MetricSettings(resamples=200)


def test_strata_have_equal_parts_of_the_expected_spread_and_items_without_a_lead_come_last() -> None:
    leads = np.array([*np.linspace(0, 4, 400), np.nan, np.nan])
    found = lead_strata(leads, 4)
    assert (np.diff(found) >= 0).all() and np.unique(found).tolist() == [0, 1, 2, 3, 4]
    p = 1 / (1 + np.exp(1 + 2.35 * leads[:400]))
    parts = np.bincount(found[:400], weights=np.sqrt(p * (1 - p)))
    assert parts / parts.sum() == pytest.approx(0.25, abs=0.01)
    assert len(set(lead_strata([0.5] * 7, 4).tolist())) == 1  # equal leads are in one stratum


def test_neymans_allocation_follows_size_and_spread_within_its_bounds() -> None:
    # Shares 100 * 0.3 : 100 * 0.1 of 40 items.
    assert allocate([100, 100], [0.3, 0.1], 40).tolist() == [30, 10]
    # The first stratum has 20 items only: the others go to the second.
    assert allocate([20, 100], [0.9, 0.1], 40).tolist() == [20, 20]
    # What was drawn stays drawn, and a stratum without spread has two.
    assert allocate([100, 100], [0.3, 0.0], 40, drawn=[0, 10]).tolist() == [30, 10]
    assert allocate([100, 100], [0.3, 0.0], 40).tolist() == [38, 2]
    assert allocate([50, 50], [0.0, 0.0], 20).tolist() == [10, 10]
    assert allocate([50, 1], [0.1, 0.1], 1000).tolist() == [50, 1]


@given(
    st.lists(st.tuples(st.integers(1, 200), st.floats(0, 1)), min_size=1, max_size=12),
    st.integers(0, 3000),
    st.integers(0, 50),
)
def test_an_allocation_keeps_its_bounds_and_its_total(strata: list[tuple[int, float]], total: int, drawn: int) -> None:
    sizes, deviations = (np.array(x) for x in zip(*strata, strict=True))
    least = np.minimum(np.maximum(drawn, 2), sizes)
    found = allocate(sizes, deviations, total, drawn=drawn)
    assert (found >= least).all() and (found <= sizes).all()
    assert found.sum() == min(max(total, least.sum()), sizes.sum())


def test_a_weighted_mean_and_its_variances_by_hand() -> None:
    # Strata of 4 and 8 items, two drawn of each: means 1/2 and 0, so that m = 4/12 * 1/2 = 1/6.
    design = Design(np.array([0, 0, 1, 1]), np.array([4, 4, 8, 8]), np.array([2, 2, 2, 2]))
    found = weighted_mean([1, 0, 0, 0], design)
    assert found.value == pytest.approx(1 / 6)
    # (4/12)^2 * s^2/n * (1 - n/N) with s^2 = 1/2, n = 2, N = 4: 1/9 * 1/4 * 1/2
    assert found.benchmark == pytest.approx(1 / 72)
    # Of what the benchmark is a sample of: m (1 - m)/N more.
    assert found.population == pytest.approx(1 / 72 + 5 / 36 / 12)
    # Only the items of the first stratum: the mean of a part, of which as many are in the sample as in the part.
    part = weighted_mean([1, 0], design[np.array([0, 1])])
    assert part.value == 0.5 and part.benchmark == pytest.approx(1 / 4 * 1 / 2)


def test_a_stratum_without_a_change_varies_as_the_model_of_all_says() -> None:
    stratum, size, drawn = np.array([0, 0, 1, 1]), np.array([4, 4, 8, 8]), np.array([2, 2, 2, 2])
    plain = weighted_mean([1, 0, 0, 0], Design(stratum, size, drawn))
    smooth = weighted_mean([1, 0, 0, 0], Design(stratum, size, drawn, np.array([0.1, 0.1, 0.1, 0.1])))
    # 30 expected items beside n - 1 = 1: s^2 = 30 * 0.09/31; (8/12)^2 * s^2/2 * (1 - 2/8) is added
    assert smooth.benchmark - plain.benchmark == pytest.approx(4 / 9 * 30 * 0.09 / 31 / 2 * 0.75)
    assert smooth.value == plain.value
    # Of a model without any flips: a thirtieth of the share of flips, 1/6, or of few flips, 1/51, its square
    for n, q in ((8, 0.03 / 6), (98, 1 / 51**2)):
        first, most = 4 / (4 + n), np.array([4, 4, n, n])
        none, least = (weighted_mean([1, 0, 0, 0], Design(stratum, most, drawn, of)) for of in (None, np.zeros(4)))
        expected = (1 - first) ** 2 * 30 * q * (1 - q) / 31 / 2 * (1 - 2 / n)
        assert least.benchmark - none.benchmark == pytest.approx(expected)
    # Where more was seen than expected, and of values that are no events, nothing changes.
    values = [0.5, 0.0, 0.0, 0.0]
    same = [weighted_mean(values, Design(stratum, size, drawn, q)) for q in (None, np.full(4, 0.1))]
    assert same[0] == same[1]


def test_a_design_that_contradicts_itself_is_refused() -> None:
    two = np.array([0, 0])
    with pytest.raises(DataError, match="do not agree"):
        Design(two, np.array([4, 5]), np.array([2, 2]))
    with pytest.raises(DataError, match="more items than were drawn"):
        Design(two, np.array([4, 4]), np.array([1, 1]))


@given(st.integers(0, 2**32 - 1))
def test_with_all_items_every_estimate_is_the_plain_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(30, 60))
    before, after = rng.random(n) < 0.6, rng.random(n) < 0.5
    groups = rng.integers(0, 25, n) if seed % 2 else np.arange(n)
    strata = np.sort(rng.integers(0, 3, n))
    sizes = np.bincount(strata)[strata]
    design = Design(strata, sizes, sizes)
    plain, drawn = groups, Units(groups, design)
    assert design.is_whole and design.n_items == n
    for of_all, of_drawn in (
        (Proportion.of(before, plain), Proportion.of(before, drawn)),
        (PairedDifference.of(before, after, plain), PairedDifference.of(before, after, drawn)),
    ):
        value, interval = of_all.at(SETTINGS, 1.0)
        weighted, ends = of_drawn.at(SETTINGS, 1.0)
        assert weighted == pytest.approx(value)
        if interval is not None and len(np.unique(groups)) < n:
            assert ends == pytest.approx(interval, abs=of_sum(4096))
        # Of the benchmark itself nothing is left to vary.
        value, interval = of_drawn.at(MetricSettings(resamples=200, reading="benchmark"), 1.0)
        assert interval is None or interval == pytest.approx((value, value))


def test_the_mean_of_drawn_values_has_the_interval_of_its_variance() -> None:
    rng = np.random.default_rng(0)
    strata = np.repeat([0, 1], [60, 30])
    design = Design(strata, np.where(strata == 0, 120, 600), np.where(strata == 0, 60, 30))
    values = rng.exponential(size=90) * np.where(strata == 0, 1.0, 0.1)
    mean = weighted_mean(values, design)
    alike = as_if_independent(values, design, mean.population)
    assert alike.mean() == pytest.approx(mean.value)
    assert alike.var() / 90 == pytest.approx(mean.population)
    value, interval = Mean.of(values, Units(np.arange(90), design), skewed=True).at(SETTINGS, 1.0)
    assert value == mean.value and interval is not None and interval[0] < value < interval[1]
    value, interval = Mean.of(np.minimum(values, 1), Units(np.arange(90), design), bounds=(0.0, 1.0)).at(SETTINGS, 1.0)
    assert interval is not None and 0 <= interval[0] < value < interval[1] <= 1


@pytest.mark.parametrize("grouped", [False, True])
def test_intervals_of_drawn_shares_cover_what_they_promise(grouped: bool) -> None:
    """Strata with 20, 8 and 1 % of changes, drawn by fixed numbers; groups of five that tend to change together."""
    rng = np.random.default_rng(7)
    rates, drawn, n = np.array([0.2, 0.08, 0.01]), np.array([100, 60, 40]), 300
    covered = {"population": 0, "benchmark": 0}
    for _ in range(400):
        groups = np.arange(3 * n) // 5 if grouped else np.arange(3 * n)
        luck = rng.gamma(4.0, 1 / 4, 3 * n)[groups]
        strata = rng.permuted(np.repeat([0, 1, 2], n))
        changed = rng.random(3 * n) < np.minimum(rates[strata] * luck, 1)
        rows = np.concatenate([rng.permutation(np.flatnonzero(strata == h))[: drawn[h]] for h in range(3)])
        design = Design(strata[rows], np.full(len(rows), n), drawn[strata[rows]])
        share = Proportion.of(changed[rows], Units(groups[rows], design))
        for reading, truth in (("population", rates.mean()), ("benchmark", changed.mean())):
            _, interval = share.at(MetricSettings(reading=reading), 1.0)  # type: ignore[arg-type]
            covered[reading] += interval[0] <= truth <= interval[1]
    assert min(covered.values()) >= 0.93 * 400 and max(covered.values()) <= 0.985 * 400


def test_the_model_finds_the_shares_of_flips_and_exists_without_one() -> None:
    rng = np.random.default_rng(1)
    leads = rng.exponential(1.5, 4000)
    truth = 1 / (1 + np.exp(0.5 + 2.0 * leads))
    model = FlipModel.fit(leads, rng.random(4000) < truth)
    assert model.level == pytest.approx(-0.5, abs=0.25) and model.slope == pytest.approx(2.0, abs=0.3)
    assert np.abs(model.probability(leads) - truth).max() < 0.05
    none = FlipModel.fit(leads[:100], np.zeros(100, dtype=bool)).probability([0.0, 1.0, 10.0])
    assert np.isfinite(none).all() and none[0] < 0.3 and none[1] < 0.02 and none[2] < 1e-6


def test_a_forecast_has_the_share_of_flips_of_items_that_were_not_run() -> None:
    rng = np.random.default_rng(2)
    parts, leads, others = np.repeat(np.arange(20), 40), rng.exponential(1.5, 800), rng.exponential(2.5, 200)

    def flips(x: np.ndarray, shift: np.ndarray) -> np.ndarray:
        return rng.random(len(x)) < 1 / (1 + np.exp(0.5 - shift + 2.0 * x))

    for between in (0.0, 0.7):  # how much parts differ in more than their leads
        held, widths = [], []
        for _ in range(60):
            flipped = flips(leads, between * rng.standard_normal(20)[parts])
            found = forecast_flips(leads, flipped, parts, others, np.zeros(200), draws=100)
            share, interval = found.share(slice(None))
            assert interval is not None and interval.low < share < interval.high
            widths.append(interval.high - interval.low)
            held.append(interval.low <= flips(others, between * rng.standard_normal(1)).mean() <= interval.high)
        assert np.mean(held) >= 0.85, between
    assert np.mean(widths) > 0.1 and share == pytest.approx(found.expected.mean())


def test_a_forecast_from_two_parts_has_no_interval() -> None:
    # How much parts differ cannot be known from two of them.
    found = forecast_flips([0.1, 1.0, 2.0, 3.0], [True, False, False, False], list("aabb"), [0.5, 2.5], list("cc"))
    share, interval = found.share([True, True])
    assert 0 < share < 1 and interval is None and found.expected[0] > found.expected[1]


def test_the_certificate_by_hand() -> None:
    # p = (0.6, 0.4): the nearest distribution without a first option is (0.5, 0.5).
    kl = 0.6 * math.log(0.6 / 0.5) + 0.4 * math.log(0.4 / 0.5)
    assert smallest_kl_to_change([[0.6, 0.4]])[0] == pytest.approx(kl)
    # Other options keep their mass; equal first options need nothing.
    assert smallest_kl_to_change([[0.3, 0.2, 0.5], [0.4, 0.2, 0.4]]) == pytest.approx(
        [0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4), 0.0]
    )
    assert smallest_kl_to_change([[1.0, 0.0]])[0] == pytest.approx(math.log(2))
    with pytest.raises(DataError, match="probabilities"):
        smallest_kl_to_change([[0.9, 0.2]])


def test_no_distribution_with_another_first_option_is_nearer_than_the_certificate_says() -> None:
    rng = np.random.default_rng(3)
    p = rng.dirichlet(np.full(4, 0.7), 100_000)
    q = 0.5 * p + 0.5 * rng.dirichlet(np.full(4, 0.7), 100_000)
    near = rng.random(100_000) < 0.5  # half of them as near as can be: both first options exchanged, or nearly
    order = np.argsort(p, axis=1)
    best, second = order[:, -1], order[:, -2]
    rows = np.arange(100_000)
    middle = (p[rows, best] + p[rows, second]) / 2
    swapped = p.copy()
    swapped[rows, best], swapped[rows, second] = middle * (1 - 1e-9), middle * (1 + 1e-9)
    q = np.where(near[:, None], swapped, q)
    kl = (p * np.log(p / q)).sum(axis=1)
    changed = q.argmax(axis=1) != p.argmax(axis=1)
    assert changed.sum() > 40_000
    assert (kl[changed] < smallest_kl_to_change(p)[changed] - 1e-12).sum() == 0
