"""Eq. 1 and corpus statistics: by hand, against scipy, and as inequalities."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_compress.errors import DataError
from mlflow_compress.metrics import compute_all
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, MetricSettings
from mlflow_compress.metrics.perplexity import statistics
from mlflow_compress.metrics.stats.corpus_statistics import corpus_statistics, mean_and_error, percentiles
from mlflow_compress.records import RunRecords, TokenDistances, TokenScores
from tests import metric_records
from tests.metric_records import QUICK


def test_equation_one_weights_items_then_options():
    # Items of 4 options (mmlu) and of 2 (piqa) weigh the same, whatever their number of option rows.
    full = metric_records.inputs(9)
    d = full.variant.option_distances
    per_item = []
    for task in ("mmlu", "piqa"):
        for i in range(9):
            per_item.append(d.where(task=task, item_id=f"{i:05d}", permutation=0).column("kl").mean())
    (pooled,) = [r for r in compute_all(full) if r.name == "distance/kl_mean" and r.task is None]
    assert pooled.value == pytest.approx(np.mean(per_item))
    assert pooled.n == 18


def _corpus(n=400, seed=0, **changes):
    rng = np.random.default_rng(seed)
    nll_b = rng.exponential(2.0, n)
    nll_q = np.maximum(nll_b + 0.1 * rng.normal(size=n), 1e-3)
    given = {
        "nll_baseline": nll_b,
        "nll_variant": nll_q,
        "kl": rng.exponential(0.05, n),
        "p_baseline": np.exp(-nll_b),
        "p_variant": np.exp(-nll_q),
        "same_top": rng.random(n) > 0.1,
    }
    return {**given, **changes}


def test_corpus_statistics_by_hand():
    # nll_b = (1, 3), nll_q = (2, 5): means 2 and 3.5. se(b)² = (5 - 4)/1 = 1, se(q)² = (14.5 - 12.25)/1 = 2.25,
    # cov = (8.5 - 7)/1 = 1.5 = se(b) se(q), so the correlation is 1. u(ln ratio)² = 2.25 + 1 - 3 = 0.25.
    # dp = (-0.1, 0.3): mean 0.1, se² = (0.05 - 0.01)/1 = 0.04; RMS = sqrt(0.05).
    # dp² = (0.01, 0.09), se² = 0.0041 - 0.0025.
    s = corpus_statistics(
        nll_baseline=[1, 3],
        nll_variant=[2, 5],
        kl=[0.0, 1.0],
        p_baseline=[0.5, 0.1],
        p_variant=[0.4, 0.4],
        same_top=[True, False],
    )
    assert s.n == 2
    assert s.perplexity_baseline == pytest.approx((math.exp(2), math.exp(2)))
    assert s.perplexity_variant == pytest.approx((math.exp(3.5), 1.5 * math.exp(3.5)))
    assert s.log_ratio == pytest.approx((1.5, 0.5))
    assert s.ratio == pytest.approx((math.exp(1.5), 0.5 * math.exp(1.5)))
    u_b, u_q = math.exp(2), 1.5 * math.exp(3.5)
    assert s.difference == pytest.approx((math.exp(3.5) - math.exp(2), u_q - u_b))  # correlation 1: |u_q - u_b|
    assert s.correlation == pytest.approx(1.0)
    assert s.kl == pytest.approx((0.5, 0.5))
    assert s.dp_mean == pytest.approx((0.1, 0.2))
    assert s.dp_rms == pytest.approx((math.sqrt(0.05), 0.5 / math.sqrt(0.05) * 0.04))
    assert s.p_correlation is None  # p_variant does not vary
    assert s.same_top == pytest.approx((0.5, 0.5))
    assert s.kl_percentiles[0.75] == 0.75 and s.dp_percentiles[0.0] == pytest.approx(-0.1)


def test_corpus_statistics_against_numpy():
    given = _corpus()
    s = corpus_statistics(**given)
    nll_b, nll_q = given["nll_baseline"], given["nll_variant"]
    assert s.perplexity_variant.value == pytest.approx(np.exp(nll_q.mean()))
    assert s.perplexity_variant.uncertainty == pytest.approx(np.exp(nll_q.mean()) * nll_q.std(ddof=1) / 20)
    assert s.correlation == pytest.approx(np.corrcoef(nll_b, nll_q)[0, 1])
    assert s.p_correlation == pytest.approx(np.corrcoef(given["p_baseline"], given["p_variant"])[0, 1])
    assert s.log_ratio.uncertainty == pytest.approx((nll_q - nll_b).std(ddof=1) / 20)
    assert s.kl_percentiles[0.999] == pytest.approx(np.percentile(given["kl"], 99.9))


def test_what_does_not_vary_has_no_uncertainty():
    nll = {"nll_baseline": np.full(3, 11.771108204141369), "nll_variant": np.full(3, 1.8984375)}
    p = {"p_baseline": np.full(3, 1 / 3), "p_variant": np.full(3, 0.1)}
    s = corpus_statistics(**nll, **p, kl=np.zeros(3), same_top=np.ones(3, dtype=bool))
    assert s.difference.uncertainty == s.log_ratio.uncertainty == s.perplexity_baseline.uncertainty == 0.0
    assert s.correlation is s.p_correlation is None


tokens = st.lists(st.tuples(*[st.floats(1e-3, 20.0)] * 2, st.floats(0.0, 5.0), st.booleans()), min_size=2, max_size=30)


@QUICK
@given(tokens)
def test_corpus_statistics_hold_together(rows):
    nll_b, nll_q, kl, top = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    given = {"kl": kl, "same_top": top > 0}
    s = corpus_statistics(
        nll_baseline=nll_b, nll_variant=nll_q, p_baseline=np.exp(-nll_b), p_variant=np.exp(-nll_q), **given
    )
    back = corpus_statistics(
        nll_baseline=nll_q, nll_variant=nll_b, p_baseline=np.exp(-nll_q), p_variant=np.exp(-nll_b), **given
    )
    assert s.ratio.value * s.perplexity_baseline.value == pytest.approx(s.perplexity_variant.value)
    assert s.difference.value == pytest.approx(-back.difference.value)
    assert s.log_ratio.value == pytest.approx(-back.log_ratio.value)
    both = s.perplexity_baseline.uncertainty + s.perplexity_variant.uncertainty
    assert s.difference.uncertainty == pytest.approx(back.difference.uncertainty, abs=1e-7 * both)  # they cancel
    assert s.dp_rms.value >= abs(s.dp_mean.value) - 1e-12
    assert s.correlation is None or -1 - 1e-6 <= s.correlation <= 1 + 1e-6
    levels = list(s.kl_percentiles.values())
    assert levels == sorted(levels, reverse=True) and levels[0] == kl.max() and levels[-1] == kl.min()


def test_one_token_and_equal_models():
    one = corpus_statistics(
        nll_baseline=[1.0], nll_variant=[1.0], kl=[0.0], p_baseline=[0.3], p_variant=[0.3], same_top=[True]
    )
    assert one.log_ratio == (0.0, 0.0) and one.correlation is None and one.dp_rms == (0.0, 0.0)
    assert mean_and_error([4.0]) == (4.0, 0.0)
    assert percentiles([1.0, 2.0], (0.5,)) == {0.5: 1.5}


@pytest.mark.parametrize(
    "changes",
    [
        {"kl": np.full(400, np.nan)},
        {"p_variant": np.full(400, 1.5)},
        {"nll_variant": np.ones(3)},
        {"nll_baseline": np.array([])},
    ],
)
def test_broken_corpora_are_refused(changes):
    with pytest.raises(DataError):
        corpus_statistics(**_corpus(**changes))


def test_records_give_the_same_statistics_as_arrays():
    full = metric_records.inputs(3)
    b, v, d = full.baseline.token_scores, full.variant.token_scores, full.variant.token_distances
    found = statistics(b, v, d)
    expected = corpus_statistics(
        nll_baseline=b.column("nll"),
        nll_variant=v.column("nll"),
        kl=d.column("kl"),
        p_baseline=b.column("p_target"),
        p_variant=v.column("p_target"),
        same_top=d.column("same_top"),
    )
    assert found == expected
    results = {r.name: r.value for r in compute_all(full) if r.task is None}
    assert results["quality/perplexity"] == pytest.approx(found.perplexity_variant.value)
    assert results["quality/perplexity_ratio"] == pytest.approx(found.ratio.value)
    assert results["distance/corpus_kl_mean"] == pytest.approx(found.kl.value)
    assert results["distance/corpus_dp_rms_pct"] == pytest.approx(100 * found.dp_rms.value)
    assert results["distance/corpus_kl_p99"] == pytest.approx(found.kl_percentiles[0.99])


def test_the_corpus_kl_by_context_by_hand():
    # Two documents of 16 and 8 scored tokens, positions 1 to 16. In ranges of 2 they would be 9: the width is 4.
    keys = [
        {"task": "c", "item_id": f"{doc}.0", "position": p} for doc, n in ((0, 16), (1, 8)) for p in range(1, n + 1)
    ]
    score = {"target": 1, "nll": 1.0, "p_target": 0.3, "argmax": 1}
    rows = {"kl_reverse": 0.0, "js": 0.0, "tv": 0.0, "same_top": True, "top10": 1.0, "rbo10": 1.0}
    scores = TokenScores.from_rows([{**key, **score} for key in keys])
    distances = TokenDistances.from_rows([{**key, **rows, "kl": 0.25 * key["position"]} for key in keys])
    run = RunRecords(token_scores=scores)
    found = MetricInputs(run, replace(run, token_distances=distances), settings=MetricSettings())
    bins = {r.category: r for r in compute_all(found) if r.name == "distance/corpus_kl_mean" and r.category}
    assert list(bins) == [f"tokens {a}-{a + 3}" for a in (0, 4, 8, 12, 16)]
    # Tokens 1 to 3 of both; 8 of both and 9 to 11 of one: (2 * 8 + 9 + 10 + 11) / 5 / 4.
    assert [bins[f"tokens {a}-{a + 3}"].value for a in (0, 8)] == pytest.approx([0.5, 2.3])
    assert bins["tokens 8-11"].n == 5
    assert all(r.low is None for r in bins.values())  # two documents
