"""Groups of unequal sizes count as fewer of one size, and no metric has an interval of width 0."""

import numpy as np
import pytest

from mlflow_compress.metrics import MetricInputs, MetricSettings, compute_all
from mlflow_compress.metrics.core.account import Account, take_account
from mlflow_compress.metrics.core.estimates import Mean, PairedDifference, Proportion, Ratio, Resampled
from mlflow_compress.metrics.stats import intervals
from mlflow_compress.metrics.stats.bootstrap import first_column
from tests import metric_records


def test_groups_count_as_so_many_of_one_size() -> None:
    assert intervals.effective_groups([7] * 20) == intervals.effective_groups([7] * 19 + [6]) == 20
    assert intervals.effective_groups([30] + [1] * 70) == 10  # 100^2/970, rounded
    # One group of 40 and 60 of one item: in the first all are hits, and none in the others. What these have among them
    # says nothing of two items of a group, so the effect is the variance between groups alone.
    one, groups = np.repeat([1, 0], [40, 60]), np.r_[np.zeros(40), np.arange(1, 61)]
    assert intervals.design_effect(one, groups).effect > 20
    # Two large groups of a mixture, and ten of two items that are alike.
    hits = np.r_[np.tile([0, 1], 8), np.repeat([0, 1] * 5, 2)]
    groups = np.repeat(np.arange(12), [8, 8] + [2] * 10)
    # m = 1/2, so e = 0 in the large groups and 1 or -1 in the others: sum((e^2 - q)/(n - 1)) = 2 (0 - 2)/7 + 10 (1 -
    # 1/2), over sum(q) = 9; sum(n^2)/n = (128 + 40)/36
    assert intervals.design_effect(hits, groups).effect == pytest.approx(1 + (5 - 4 / 7) / 9 * (168 / 36 - 1))


def test_rare_events_in_few_groups_do_not_show_that_items_of_a_group_are_alike() -> None:
    """Two events in 40 groups of five: m = .01, e = .95 twice, so r is about -m; half the pairs of a third group."""
    hits = np.zeros(200)
    hits[[0, 5]] = 1.0
    groups = np.repeat(np.arange(40), 5)
    assert intervals.design_effect(hits, groups).effect == 1.0
    assert intervals.design_effect(hits, groups, rare=True).effect == pytest.approx(1 + 4 / (2 * (2 + 1)), rel=0.01)
    wide, narrow = (
        Proportion(2, 200, effect=intervals.design_effect(hits, groups, rare=rare)).at(MetricSettings(), 1.0)[1]
        for rare in (True, False)
    )
    assert wide[1] > narrow[1] and Proportion.of(hits == 1.0, groups).at(MetricSettings(), 1.0)[1] == wide


def test_one_group_of_30_percent_leaves_no_interval() -> None:
    groups = np.repeat(np.arange(71), [30] + [1] * 70)
    rng = np.random.default_rng(0)
    hits, values = rng.random(100) < 0.2, rng.random(100)
    for estimate in (
        Proportion.of(hits, groups),
        PairedDifference.of(hits, ~hits, groups),
        Mean(values, groups=groups),
        Mean(values, groups=groups, bounds=(0.0, 1.0)),
        Resampled(values[:, None], first_column, groups=groups),
        Ratio(*intervals.group_sums(values, groups)),
    ):
        assert estimate.at(MetricSettings(), 1.0)[1] is None and np.isfinite(estimate.at(MetricSettings(), 1.0)[0])


def test_the_account_says_as_how_many_groups_count() -> None:
    full = metric_records.inputs(20)
    account = take_account(MetricInputs(metric_records.in_groups(full.baseline, 6)))
    assert account.groups is not None and account.effective_groups < intervals.FEWEST_GROUPS < account.groups
    few = f"(no intervals: too few, as they count as {account.effective_groups} of one size, and 20 are needed)"
    assert f"they are in {account.groups} groups that share a text or source {few}" in account.sentence
    assert Account.from_dict(account.to_dict()) == account


def test_no_metric_has_an_interval_of_width_0() -> None:
    """A variant that equals its baseline has nothing but equal values in every distance and every difference."""
    for n, per_group in ((2, 1), (20, 1), (60, 1), (300, 1), (60, 2), (300, 5)):
        full = metric_records.inputs(n)
        runs = [metric_records.in_groups(run, per_group) for run in (full.baseline, full.variant, full.noise)]
        full = MetricInputs(*runs, embeddings=full.embeddings, settings=MetricSettings(resamples=200))
        results = [*compute_all(metric_records.identical(full)), *compute_all(full)]
        assert [r for r in results if r.low is not None and r.low >= r.high] == [], (n, per_group)
        assert n == 2 or sum(r.low is not None for r in results) > 20
