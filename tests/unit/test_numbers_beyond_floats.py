"""Numbers that no float can hold: what is left out says why and how far, what is refused is one error of ours."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlflow_compress.commands.evaluate.result import Evaluation
from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics import MetricInputs, compute_all, headline, unmet
from mlflow_compress.metrics.core.metric_inputs import MetricSettings
from mlflow_compress.metrics.stats.bootstrap import bootstrap, studentized_interval
from mlflow_compress.metrics.stats.corpus_statistics import corpus_statistics, mean_and_error
from mlflow_compress.metrics.stats.intervals import design_effect, paired_difference
from mlflow_compress.records import RunRecords
from mlflow_compress.reporting.details import corpus_table, details
from tests import metric_records

WINDOWS, PER_WINDOW = 48, 5  # of each corpus 24 documents, enough for an interval


def records(nll: Any) -> RunRecords:
    rng = np.random.default_rng(0)
    values = np.broadcast_to(np.asarray(nll, dtype=np.float64), WINDOWS * PER_WINDOW)
    return RunRecords(
        token_scores=metric_records.tokens(rng, windows=WINDOWS, per_window=PER_WINDOW, nll=values + rng.random(240))
    )


def inputs(baseline: Any, variant: Any) -> MetricInputs:
    base, moved = records(baseline), records(variant)
    assert moved.token_scores is not None
    distances = metric_records.token_distances(moved.token_scores, np.random.default_rng(1), 1.0)
    return MetricInputs(base, replace(moved, token_distances=distances), settings=MetricSettings(resamples=200))


FIRST = np.arange(WINDOWS * PER_WINDOW) < WINDOWS * PER_WINDOW // 2  # wiki; the rest is news


@pytest.mark.parametrize(
    ("baseline", "variant", "said"),
    [
        (4159.0, 4158.0, r"the baseline's mean negative log-likelihood on \w+ is 4,159\.\d nats per token: above 709"),
        (3.0, 1e5, r"the variant's mean .* on \w+ is 100,000\.\d nats"),
        (3.0, np.where(FIRST, 3.0, 900.0), r"the variant's mean .* on news is 900\.\d nats"),
        (np.where(FIRST, 3.0, 709.6), 3.0, r"the baseline's mean .* on news is 710\.\d nats"),
    ],
)
def test_a_perplexity_larger_than_floats_is_left_out_and_says_how_far(baseline: Any, variant: Any, said: str) -> None:
    given = inputs(baseline, variant)
    results = compute_all(given)
    assert not any(result.name.startswith("quality/perplexity") for result in results)
    assert "distance/corpus_kl_mean" in headline(results)  # everything else is there
    reasons = unmet(given)
    found = Evaluation(name="v", results=tuple(results), not_computed=reasons, records_folder=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=said):
        found["quality/perplexity"]
    json.dumps(details(given, results), allow_nan=False)


def test_a_single_token_beyond_floats_does_not_take_the_perplexity_away() -> None:
    nll = np.full(WINDOWS * PER_WINDOW, 2.0)
    nll[7] = 5000.0
    found = headline(compute_all(inputs(2.0, nll)))
    # (239 tokens of 2 and one of 5,000, and half a nat on average)
    assert math.log(found["quality/perplexity"].value) == pytest.approx((239 * 2 + 5000) / 240 + 0.5, abs=0.1)


def test_an_interval_with_an_end_beyond_floats_is_left_out() -> None:
    # Every sixth document has 3,000 nats per token: the mean is 583 nats, and its interval ends above 709.
    nll = np.repeat(np.where(np.arange(WINDOWS) % 6 == 0, 3000.0, 100.0), PER_WINDOW)
    for given in (inputs(2.0, nll), MetricInputs(records(nll), settings=MetricSettings(resamples=200))):
        found = headline(compute_all(given))["quality/perplexity"]
        assert 500 < math.log(found.value) < 700 and (found.low, found.high) == (None, None)


def test_statistics_of_perplexities_between_the_root_of_the_largest_float_and_it() -> None:
    # exp(400) is 5e173, and its square, of which the uncertainty of a difference is made, no float.
    table = corpus_table(inputs(400.0, 401.0))
    for row in table:
        assert row["perplexity_baseline"][0] == pytest.approx(math.exp(400.5), rel=1)
        assert row["log_ratio"][0] == pytest.approx(1.0) and row["ratio"] is not None and row["difference"] is None
    [news, wiki] = corpus_table(inputs(np.where(FIRST, 3.0, 2000.0), 2000.0))
    assert news["perplexity_baseline"] is news["perplexity_variant"] is news["difference"] is None
    assert wiki["perplexity_baseline"] is not None and wiki["perplexity_variant"] is wiki["ratio"] is None
    json.dumps(table, allow_nan=False)


@pytest.mark.parametrize(
    "counts",
    [
        (math.nan, 0, 10),
        (0, math.nan, 10),
        (0, 0, math.nan),
        (0, 0, math.inf),
        (math.inf, 0, math.inf),
        (0, 3, 1e308),
        (-1, 0, 9),
    ],
)
def test_what_are_no_counts_of_pairs_is_refused(counts: tuple[float, float, float]) -> None:
    with pytest.raises(DataError, match=r"no counts of pairs.*gained \+ lost <= n"):
        paired_difference(*counts)


@pytest.mark.parametrize(
    "values", [[0.0] * 7 + [1e300], [1e155, 0, 0, 1, 2, 3], [1e308] * 5 + [0], [-1e308] * 5 + [1e308]]
)
@pytest.mark.parametrize(
    "function",
    [
        bootstrap,
        lambda x: bootstrap(x, method="percentile"),
        lambda x: bootstrap(np.column_stack([x, np.ones(len(x))])),
        studentized_interval,
        mean_and_error,
        lambda x: design_effect(x, [0, 0, 1, 1, 2, 2, 3, 3][: len(x)]),
    ],
)
def test_values_too_large_to_calculate_with_are_refused(function: Callable[[Any], object], values: list[float]) -> None:
    with pytest.raises(DataError, match=r"holds values that are too large.*from -1e\+70 to 1e\+70"):
        function(values)


def test_values_as_large_as_allowed_have_finite_intervals() -> None:
    values = np.array([0.0, 1.0, 2.0, 3.0, 5.0, 7.0] * 2) * 1e69
    for found in (bootstrap(values), studentized_interval(values)):
        assert found is not None and 0 <= found.low < values.mean() < found.high < 1e70
    ones = np.ones(20)
    with pytest.raises(DataError, match="nll_variant holds values that are too large"):
        corpus_statistics(
            nll_baseline=ones, nll_variant=[*ones[1:], 1e200], kl=ones, p_baseline=ones, p_variant=ones, same_top=ones
        )
