"""Estimates with their intervals, the loop over subsets, and what families declare about their items."""

import numpy as np
import pytest
import scipy.stats
from statsmodels.stats.proportion import proportion_confint

from mlflow_compress import metrics
from mlflow_compress.errors import ConfigError
from mlflow_compress.item_families import ITEM_FAMILIES, ItemFamily
from mlflow_compress.items.task import FAMILIES
from mlflow_compress.metrics.core.estimates import Resampled
from mlflow_compress.metrics.stats.bootstrap import ratio
from mlflow_compress.metrics.stats.intervals import paired_difference
from mlflow_compress.records import Items, RunRecords
from tests.metric_records import item_of

SETTINGS = metrics.MetricSettings(resamples=200)
SHARE = metrics.MetricKey.share("quality/even", "neither", "Items with an even number.")
PERCENT = metrics.MetricKey.percent("distance/even_pct", "neither", "The same in percent.", by_category=False)


def _items(*families: str, n: int = 4) -> Items:
    """Items of one task per family, named after it; the category of item i is "even" or "odd"."""
    return Items.from_rows(
        [
            item_of(i, task=f"t_{family}", family=family, category=("even", "odd")[i % 2], answers=["x"])
            | ({"rule": "exact_match", "options": None, "gold": None} if family == "exact" else {})
            for family in families
            for i in range(n)
        ]
    )


def _inputs(*families: str) -> metrics.MetricInputs:
    return metrics.MetricInputs(RunRecords(items=_items(*families)), settings=SETTINGS)


def test_estimates_have_the_intervals_of_their_kind():
    value, interval = metrics.Proportion(3, 12).at(SETTINGS, 1.0)
    assert value == 0.25 and interval == pytest.approx(
        (proportion_confint(3, 12, method="beta")[0], proportion_confint(3, 12, method="wilson")[1])
    )
    value, percent = metrics.Proportion(3, 12).at(SETTINGS, 100.0)
    assert value == 25.0 and percent == pytest.approx([100 * x for x in interval])
    change = metrics.PairedDifference(gained=2, lost=7, n=50)
    assert change.at(SETTINGS, 1.0) == (-0.1, paired_difference(2, 7, 50))
    expected = scipy.stats.binomtest(2, 9).pvalue - scipy.stats.binom.pmf(2, 9, 0.5)
    assert change.p_value.at(SETTINGS, 1.0) == (pytest.approx(expected), None)
    assert change.p_value.n == 50
    mean = metrics.Mean.of_scored(np.array([1.0, np.nan, 3.0]))
    assert (mean.n, mean.n_unscored) == (2, 1)
    assert mean.at(SETTINGS, 100.0)[0] == 2.0  # a mean is in the key's unit already
    assert metrics.Mean(np.empty(0)).n == 0


def test_the_interval_of_a_positive_ratio_is_that_of_its_logarithm() -> None:
    """So it is the same both ways. By hand: log ratios without one of the units, and Student's t with 2 degrees."""
    columns = np.array([[2.0, 1.0], [3.0, 2.0], [7.0, 4.0]])
    value, interval = Resampled(columns, ratio, jackknife=True, positive=True).at(SETTINGS, 1.0)
    log = np.log([10 / 6, 9 / 5, 5 / 3])
    half = scipy.stats.t.ppf(0.975, 2) * np.sqrt(2 / 3 * ((log - np.log(12 / 7)) ** 2).sum())
    assert value == pytest.approx(12 / 7) and interval == pytest.approx(12 / 7 * np.exp([-half, half]))
    _, inverse = Resampled(columns[:, ::-1], ratio, jackknife=True, positive=True).at(SETTINGS, 1.0)
    assert [1 / x for x in inverse] == pytest.approx(interval[::-1])
    alone = np.array([[2.0, 0.0], [3.0, 0.0], [7.0, 1.0]])  # without the third there is no ratio
    assert Resampled(alone, ratio, jackknife=True, positive=True).at(SETTINGS, 1.0) == (12.0, None)


def test_a_formula_is_called_for_the_headline_each_task_and_each_category():
    inputs = _inputs("lettered", "cloze", "exact")
    scored = np.arange(12) != 0  # the first lettered item has no value
    number = inputs.view.item_id.astype(int)

    def even(rows):
        share = metrics.Proportion(int((number[rows] % 2 == 0).sum()), len(rows))
        return {SHARE: share, PERCENT: share}

    results = metrics.by_subset(inputs, even, scored=scored)
    shown = [(r.name, r.task, r.category, r.value, r.n, r.n_unscored) for r in results]
    # Pooled over the two families of multiple choice: 3 even ones of 7. Only lettered tasks are split by category, and
    # the category "even" has one scored item of two.
    assert shown == [
        ("quality/even", None, None, 3 / 7, 7, 1),
        ("distance/even_pct", None, None, 300 / 7, 7, 1),
        ("quality/even", "t_cloze", None, 0.5, 4, 0),
        ("distance/even_pct", "t_cloze", None, 50.0, 4, 0),
        ("quality/even", "t_exact", None, 0.5, 4, 0),
        ("distance/even_pct", "t_exact", None, 50.0, 4, 0),
        ("quality/even", "t_lettered", None, 1 / 3, 3, 1),
        ("distance/even_pct", "t_lettered", None, 100 / 3, 3, 1),
        ("quality/even", "t_lettered", "even", 1.0, 1, 1),
        ("quality/even", "t_lettered", "odd", 0.0, 2, 0),
    ]


def test_without_multiple_choice_all_graded_items_are_pooled_and_an_estimate_of_nothing_is_left_out():
    inputs = _inputs("exact", "ungraded")
    found = metrics.by_subset(inputs, lambda rows: {SHARE: metrics.Proportion(0, len(rows))})
    assert [(r.task, r.n) for r in found] == [(None, 4), ("t_exact", 4)]
    assert metrics.by_subset(_inputs("cloze"), lambda rows: {SHARE: metrics.Proportion(0, 0)}) == []
    assert metrics.pooled(_inputs("cloze"), {SHARE: metrics.Number(0.5, 0)}) == []
    [found] = metrics.pooled(metrics.MetricInputs(RunRecords()), {SHARE: metrics.Number(0.5, 3, 2)})
    assert (found.value, found.n, found.n_unscored, found.low) == (0.5, 3, 2, None)
    assert found.task is None and found.category is None


def test_every_family_declares_its_items():
    declared = {kind for _, family in FAMILIES.items() for kind in family.items}
    assert {"lettered", "lettered_six", "lettered_orders", "cloze", "last_word", "exact"} <= declared
    assert set(ITEM_FAMILIES.names()) == declared | {
        "ungraded",
        "logged",
        "tools",
        "logged_tools",
        "long_needle",
        "long_copy",
        "long_text",
    }
    for _, family in ITEM_FAMILIES.items():
        assert isinstance(family, ItemFamily)
        assert family.graded or not family.headline, "an item without an accuracy cannot be in the headline"


def test_unknown_families_and_rows_without_a_label_are_refused():
    with pytest.raises(ConfigError, match=r"Unknown item family.*lettered.*Got: 'riddles'"):
        metrics.by_subset(_inputs("riddles"), lambda rows: {})
    with pytest.raises(ConfigError, match="label"):
        metrics.MetricKey.share("quality/x", "higher", "X.", headline=5)
