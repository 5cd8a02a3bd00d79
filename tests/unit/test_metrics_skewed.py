"""Intervals for skewed and for bounded means, the tail of the KL, and what gates read of it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_compress.decide.gates import gate_values
from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics import MetricInputs, compute_all, headline, unmet
from mlflow_compress.metrics.kl_tail import mean_is_trusted, shows_clipped
from mlflow_compress.metrics.stats.bootstrap import UPPER_TAIL, bootstrap, cluster_sums, studentized_interval
from mlflow_compress.metrics.stats.intervals import bounded_mean_interval, wilson
from mlflow_compress.records import MetricResult
from tests import metric_records
from tests.metric_records import QUICK

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
    return r - highest * error(values, sizes), r - lowest * error(values, sizes)


@pytest.mark.parametrize("clusters", [False, True])
def test_studentised_equals_a_slow_implementation(clusters):
    rng = np.random.default_rng(3)
    values = rng.gamma(0.3, 0.1, size=60)
    sizes = rng.integers(5, 50, size=60).astype(float) if clusters else np.ones(60)
    picks = np.random.default_rng(7).integers(0, 60, size=(500, 60))
    expected = _slow(values, sizes, picks)
    found = studentized_interval(values, sizes if clusters else None, resamples=500, seed=7)
    assert found == pytest.approx((max(expected[0], 0.0), expected[1]), rel=1e-9)


def test_studentised_of_every_resample_by_hand():
    # Of three values there are 27 resamples, 3 of them with one value only: t is infinite in 11 %, more than any tail.
    x = np.array([0.0, 1.0, 5.0])
    assert sum(len(set(p)) == 1 for p in itertools.product(x, repeat=3)) == 3
    assert studentized_interval(x) is None
    assert studentized_interval([1.0]) is None
    assert studentized_interval([0.25] * 9) == (0.25, 0.25)
    assert studentized_interval([0.0] * 9) == (0.0, 0.0)


@QUICK
@given(st.integers(0, 10_000), st.floats(1e-6, 1e6))
def test_studentised_is_equivariant_and_holds_the_mean(seed, scale):
    x = np.random.default_rng(seed).gamma(0.5, 1.0, size=40)
    low, high = studentized_interval(x, resamples=400)
    assert 0.0 <= low <= x.mean() <= high
    assert studentized_interval(scale * x, resamples=400) == pytest.approx((scale * low, scale * high), rel=1e-6)
    assert studentized_interval(x, np.full(40, 1.0), resamples=400) == pytest.approx((low, high), rel=1e-9)


def test_studentised_reaches_further_up_than_bca_where_values_are_skewed():
    x = REAL["awq-4bit-g128/lettered"][:300].astype(float)
    assert studentized_interval(x).high - x.mean() > 1.1 * (bootstrap(x).high - x.mean())
    # Of many unskewed values all intervals are one: the tail alone differs, 2.17 standard errors instead of 1.96.
    y = np.random.default_rng(0).normal(1.0, 0.1, size=4000)
    low, high = studentized_interval(y)
    assert (high - y.mean()) / (y.mean() - low) == pytest.approx(2.17 / 1.96, rel=0.06)


def test_studentised_settings_are_checked():
    for bad in ({"resamples": 5}, {"level": 1.0}):
        with pytest.raises(ConfigError):
            studentized_interval([0.0, 1.0], **bad)
    with pytest.raises(DataError):
        studentized_interval([0.0, math.nan])
    with pytest.raises(DataError):
        studentized_interval([0.0, 1.0], [1.0])


def _upper_misses(population, n, *, draws=400, seed=0):
    """Share of samples of n, drawn with replacement, whose upper end lies below the population's mean."""
    rng = np.random.default_rng(seed)
    ends = [studentized_interval(rng.choice(population, n), resamples=600) for _ in range(draws)]
    return np.mean([end is not None and end.high < population.mean() for end in ends])


@pytest.mark.parametrize("name", ["awq-4bit-g128/pooled", "gptq-4bit-g128/lettered"])
def test_the_upper_end_covers_real_kl(name):
    population = REAL[name].astype(float)
    assert population.max() < 0.05 * population.sum()
    # 5 % are allowed; two standard errors of 400 draws are 2.2 %. `benchmarks/interval_coverage.py` has all samples.
    assert _upper_misses(population, 200) <= 0.05 + 0.022


# --- bounded mean


def test_bounded_mean_of_zeros_by_hand():
    # All staked on each of n zeros against m: the capital is (1 - m)^-n, shared with the smaller stakes of the grid. With
    # n = 10 that grid is 1 alone (sqrt(8 ln 40/10) > 1): (1 - m)^-10 = 40 gives m = 1 - 40^(-1/10).
    low, high = bounded_mean_interval(np.zeros(10))
    assert low == 0.0
    assert high == pytest.approx(1 - 40 ** (-1 / 10), abs=1e-9)
    # Ten values at the upper bound: stakes 1, 1/1.5, ... 1.5^-6 (the last above 1/10 but one) against m from below.
    low, high = bounded_mean_interval(np.full(10, 2.0), upper=2.0)
    assert high == 2.0
    assert np.mean([(1 - c + 2 * c / low) ** 10 for c in 1.5 ** -np.arange(7.0)]) == pytest.approx(40.0)


@QUICK
@given(st.integers(0, 10_000), st.integers(1, 60))
def test_bounded_mean_needs_no_order_and_scales(seed, n):
    rng = np.random.default_rng(seed)
    x = np.minimum(rng.gamma(0.3, 1.0, size=n), 1.0)
    low, high = bounded_mean_interval(x)
    assert 0.0 <= low <= x.mean() <= high <= 1.0
    assert bounded_mean_interval(rng.permutation(x)) == pytest.approx((low, high), abs=1e-9)
    assert bounded_mean_interval(5 * x, upper=5.0) == pytest.approx((5 * low, 5 * high), abs=1e-8)
    # More of the same narrows it, and another level widens it.
    assert bounded_mean_interval(np.tile(x, 5)).high <= high + 1e-9
    assert bounded_mean_interval(x, level=0.99).high >= high - 1e-9


def test_bounded_mean_is_what_its_definition_says():
    x = np.minimum(np.random.default_rng(1).gamma(0.3, 0.5, size=400), 1.0)
    high, goal = bounded_mean_interval(x).high, math.log(40.0)
    count = math.ceil(-math.log(math.sqrt(8 * goal / 400)) / math.log(1.5)) + 1

    def capital(m):
        return np.mean([np.prod(1 - c + c * (1 - x) / (1 - m)) for c in 1.5 ** -np.arange(count)])

    assert capital(high + 1e-6) >= 40.0 > capital(high - 1e-6)


def test_bounded_mean_refuses_what_it_cannot_bound():
    for bad in ({"upper": 0.0}, {"upper": math.inf}, {"level": 0.0}):
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


def _with_kl(full: MetricInputs, kl) -> MetricInputs:
    """The inputs with one KL per (item, option) row of the variant."""
    table = full.variant.option_distances
    columns = {name: table.table.column(name).to_pylist() for name in table.SCHEMA.names}
    columns["kl"] = kl
    return replace(full, variant=replace(full.variant, option_distances=type(table).from_columns(columns)))


def test_shares_and_clipped_values_by_hand():
    keys = FULL.variant.option_distances.key_rows()
    # PIQA has 60 items; item 0 has 3 nats, item 1 has 1.5, all others 0.05; the lettered items have none.
    own = {"00000": 3.0, "00001": 1.5}
    kl = [own.get(item, 0.05) if task == "piqa" else 0.0 for task, item, *_ in keys]
    found = {(r.name, r.task): r for r in compute_all(_with_kl(FULL, kl))}
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
    assert (above.low, above.high) == pytest.approx(tuple(100 * x for x in wilson(2, 60)))
    assert found["distance/kl_items", None].value == 120


def test_no_share_of_nothing():
    same = metric_records.identical(FULL)
    assert unmet(same)["kl_concentration"] == "the KL of every item is 0: no item holds a share of it"
    found = headline(compute_all(same))
    assert "distance/kl_share_top_item_pct" not in found and found["distance/kl_mean"].high is None
    assert found["distance/kl_clipped_mean"].value == 0.0 < found["distance/kl_clipped_mean"].high


def _kl_result(name, value, high, n):
    return MetricResult(name=f"distance/{name}", value=value, low=0.0, high=high, n=n)


@pytest.mark.parametrize("trusted", [True, False])
def test_gates_read_the_mean_only_where_its_interval_can_be_trusted(trusted):
    results = (
        _kl_result("kl_mean", 0.02, 0.03 if trusted else None, 300),
        _kl_result("kl_clipped_mean", 0.018, 0.04, 300),
        _kl_result("kl_above_clip_pct", 0.1, 0.5, 300),
        _kl_result("kl_items", 300.0, None, 300),
    )
    found = gate_values({r.name: r for r in results})
    assert ("gate/kl_upper" in found) == trusted != shows_clipped({r.name: r for r in results})
    ends = {"gate/kl_upper": 0.03} if trusted else {"gate/kl_clipped_upper": 0.04, "gate/kl_above_clip_pct_upper": 0.5}
    assert found == {**ends, "gate/kl_items": 300}


@pytest.mark.parametrize(
    ("n", "top", "believed"), [(200, 2.4, True), (199, 2.4, False), (1000, 2.5, False), (5000, 20.0, False)]
)
def test_a_mean_is_trusted_by_its_items_and_the_largest_share(n, top, believed):
    kl = np.full(n, (100.0 - top) / (n - 1))
    kl[3] = top
    assert mean_is_trusted(kl, np.arange(n)) == believed
    if believed:  # two items of one group hold 2.4 + 97.6/199 = 2.89 %
        assert not mean_is_trusted(kl, np.arange(n) // 2)
        assert not mean_is_trusted(-kl, np.arange(n))  # rounding below 0: nothing is known of the tail


def test_each_direction_is_trusted_by_itself():
    """Both means are from the same 220 items; of the reversed one an item holds a tenth, or of the other."""
    whole = metric_records.inputs(110)
    for odd in ("kl", "kl_reverse"):
        table = whole.variant.option_distances
        columns = {name: table.table.column(name).to_pylist() for name in table.SCHEMA.names}
        first = table.key_rows()[0][:2]
        columns |= {name: [0.05] * len(table) for name in ("kl", "kl_reverse")}
        columns[odd] = [1.2 if key[:2] == first else 0.05 for key in table.key_rows()]
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
    }  # 120 items are too few for the mean's interval
    assert found["gate/kl_items"] == 120 == pooled["distance/kl_mean"].n
    assert found["gate/flips_pct_upper"] == pooled["distance/flips_pct"].high


def test_item_kl_uses_the_studentised_interval():
    many = metric_records.inputs(110)
    result = headline(compute_all(many))["distance/kl_mean"]
    kl = many.distance("kl")[np.isin(many.view.family, ["lettered", "cloze"])]
    assert (result.low, result.high) == studentized_interval(kl)


def test_corpus_kl_uses_the_studentised_interval_over_documents():
    result = headline(compute_all(FULL))["distance/corpus_kl_mean"]
    kl = FULL.variant.token_distances.column("kl")
    sums = cluster_sums(kl, np.repeat(np.arange(24), 25))
    assert (result.low, result.high) == pytest.approx(studentized_interval(sums[:, 0], sums[:, 1]))
    assert 0.0 < UPPER_TAIL <= 1.0
