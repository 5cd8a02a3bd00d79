"""Noise floor, log-likelihood differences, planning, correlation, buckets and text overlap."""

import itertools
import math
import re
import sys
from dataclasses import replace

import numpy as np
import pyarrow.compute as pc
import pytest
import sacrebleu
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from scipy.stats import ttest_rel

from mlflow_compress.errors import AlignmentError, ConfigError, DataError
from mlflow_compress.metrics import AnswerEmbeddings, MetricInputs, compute_all, headline, unmet
from mlflow_compress.metrics.core.metric_registry import headline_keys
from mlflow_compress.metrics.margins import kl_by_confidence, mean_by_bin, token_kl_by_confidence
from mlflow_compress.metrics.noise import distinguishable, noise_table
from mlflow_compress.metrics.stats.corpus_statistics import difference_shape
from mlflow_compress.metrics.stats.correlation import pearson, spearman
from mlflow_compress.metrics.stats.intervals import wilson
from mlflow_compress.metrics.stats.sample_size import (
    fewest_without_event,
    items_to_settle,
    times_for_change,
    times_for_mean,
    times_for_share,
)
from mlflow_compress.metrics.text import bleu, rouge_l, shared_samples
from mlflow_compress.records import Generations, MetricResult, RunRecords
from mlflow_compress.reporting.headline import footnotes, headline_rows
from tests import metric_records
from tests.metric_records import QUICK
from tests.roundoff import of_sum

FULL = metric_records.inputs(30)


# --- noise floor


def _result(value, low=None, high=None):
    return MetricResult(name="x", value=value, low=low, high=high)


def test_a_distance_must_clear_its_floor_with_its_near_end():
    floor = _result(0.01)
    assert distinguishable(_result(0.02, 0.011, 0.03), floor)
    assert not distinguishable(_result(0.02, 0.009, 0.03), floor)
    assert distinguishable(_result(0.02), floor) and not distinguishable(_result(0.01), floor)
    agreement = _result(0.999)
    assert distinguishable(_result(0.95, 0.9, 0.99), agreement, direction="higher")
    assert not distinguishable(_result(0.99, 0.98, 1.0), agreement, direction="higher")
    assert not distinguishable(_result(0.02, 0.011, 0.03), _result(0.01, 0.005, 0.015))  # the floor's own doubt
    # A mean change may have either sign.
    change = _result(-0.001, -0.002, 0.0)
    assert distinguishable(_result(-0.05, -0.06, -0.04), change, direction="neither")
    assert not distinguishable(_result(0.05, -0.01, 0.11), change, direction="neither")
    assert not distinguishable(_result(0.003, 0.001, 0.005), change, direction="neither")


def test_a_servers_own_noise_is_the_distance_of_the_variants_second_answers_from_its_first() -> None:
    """The baseline's records as second answers: as many items flip as between baseline and variant, the other way."""
    found = headline(compute_all(replace(FULL, asked_again=FULL.baseline)))
    assert found["served/flips_pct"].value == found["distance/flips_pct"].value > 0
    assert found["served/all_flips_pct"].value == found["distance/all_flips_pct"].value
    itself = headline(compute_all(replace(FULL, asked_again=FULL.variant)))
    assert itself["served/flips_pct"].value == itself["served/all_flips_pct"].value == 0.0
    assert any(note.startswith("The server's own noise") and "flips " in note for note in footnotes(found))
    assert not any("server" in note for note in footnotes(headline(compute_all(FULL))))


def test_the_engines_own_distance_is_the_noise_floors_arithmetic_on_its_own_records() -> None:
    found = headline(compute_all(replace(FULL, engine=FULL.noise)))
    names = [name for name in found if name.startswith("engine/")]
    assert {name.replace("engine/", "noise/") for name in names} == {n for n in found if n.startswith("noise/")}
    for name in names:
        floor = found[name.replace("engine/", "noise/")]
        assert (found[name].value, found[name].low, found[name].n) == (floor.value, floor.low, floor.n)
    assert found["engine/kl_mean"].value > 0 and found["engine/kl_mean"].n < found["distance/kl_mean"].n + 1
    notes = footnotes(found)
    assert any(note.startswith("vLLM's own distance") and "KL 0." in note and "flips " in note for note in notes)
    assert not any("vLLM" in note for note in footnotes(headline(compute_all(FULL))))


def _labels(inputs):
    rows = noise_table(inputs, compute_all(inputs))
    return {row["name"]: row["label"] for row in rows if row["label"] is not None}


def test_the_variant_stands_out_and_a_second_run_does_not():
    results = compute_all(FULL)
    labels = _labels(FULL)
    assert labels["distance/kl_mean"] == labels["distance/corpus_kl_mean"] == "distinguishable"
    # Every distance has a label; how the KL is spread over the items, over slices of them or below a bound, is none,
    # and from values without an interval nobody knows.
    spread = {"distance/kl_items", "distance/kl_share_top_item_pct", "distance/kl_share_top_percent_pct"}
    spread |= {f"distance/corpus_kl_{name}" for name in ("max", "p99", "share_top_document_pct")}
    spread |= {"distance/worst_slice_flips_pct", "distance/worst_slice_kl_clipped", "distance/certain_pct"}
    assert set(labels) == {name for name in headline(results) if name.startswith("distance/")} - spread
    again = MetricInputs(FULL.baseline, FULL.noise, FULL.noise)
    assert set(_labels(again).values()) == {"not distinguishable from the noise floor"}
    alone = MetricInputs(FULL.baseline, FULL.variant)
    assert _labels(alone) == {}
    assert {row["floor"] for row in noise_table(alone, compute_all(alone))} == {None}
    floors = {row["name"]: row["floor"] for row in noise_table(FULL, results)}
    assert floors["distance/kl_mean"] == headline(results)["noise/kl_mean"].value


def test_equal_values_get_equal_labels_and_a_second_run_without_flips_shows_a_variants():
    """Nothing flips in the second run, but the variant flips three of 48 one way: p = 2/2^3, and 2/2^6 for six."""
    p = {row["name"]: row["p"] for row in noise_table(FULL, compute_all(FULL))}
    assert max(FULL.distance("kl")[FULL.headline_rows]) < 1.0  # no value is clipped
    assert p["distance/kl_mean"] == p["distance/kl_clipped_mean"] < 0.05
    kl = [FULL.distance("kl", noise=noise)[FULL.headline_rows] for noise in (False, True)]
    assert p["distance/kl_mean"] == pytest.approx(ttest_rel(*kl).pvalue)
    variant, noise = (MetricInputs(FULL.baseline, replace(run, items=None)) for run in (FULL.variant, FULL.noise))
    flipped = [
        (i.baseline_predictions.correct != i.variant_predictions.correct)[FULL.headline_rows, 0]
        for i in (variant, noise)
    ]
    more, fewer = (flipped[0] & ~flipped[1]).sum(), (flipped[1] & ~flipped[0]).sum()
    assert fewer == 0 and p["distance/flips_pct"] == 2 / 2**more
    assert p["distance/corpus_kl_mean"] is None  # no value per item: the intervals decide
    nearer = MetricInputs(FULL.baseline, FULL.noise, FULL.variant)
    assert {row["p"] for row in noise_table(nearer, compute_all(nearer))} == {1.0, None}


@pytest.mark.parametrize("scale", [0.3, 1.0, 1.2])
def test_the_report_and_the_details_give_one_answer(scale):
    """The second run as far from the first as the variant, times a scale."""
    moved = FULL.variant.option_distances
    names = ["kl", "kl_reverse", "js", "tv"]
    columns = {name: pc.multiply(moved.table.column(name), scale) for name in names}
    table = moved.table
    for name, column in columns.items():
        table = table.set_column(table.column_names.index(name), name, column)
    inputs = replace(FULL, noise=replace(FULL.noise, option_distances=type(moved)(table)))
    results = compute_all(inputs)
    details = {row["name"]: row for row in noise_table(inputs, results)}
    shown = {row.label: row.distinguishable for row in headline_rows(headline(results))}
    compared = 0
    for key in headline_keys():
        row = details.get(key.name)
        if key.label in shown and row is not None and row["p"] is not None and row["value"] != key.unchanged:
            compared += 1
            assert str(shown[key.label]).startswith("yes") == (row["label"] == "distinguishable"), (key.name, row)
    assert compared >= 4
    assert details["distance/kl_mean"]["label"].startswith("dist" if scale < 1 else "not")


def test_the_second_run_may_cover_fewer_items():
    few = replace(
        FULL.noise,
        items=FULL.noise.items.where(task="mmlu"),
        option_scores=FULL.noise.option_scores.where(task="mmlu"),
        option_distances=FULL.noise.option_distances.where(task="mmlu"),
        token_scores=None,
        token_distances=None,
    )
    found = headline(compute_all(MetricInputs(FULL.baseline, FULL.variant, few)))
    assert (found["noise/kl_mean"].n, found["noise/kl_mean"].n_unscored) == (30, 0)
    assert "noise/corpus_kl_mean" not in found
    assert found["noise/kl_mean"].value == pytest.approx(few.option_distances.where(permutation=0).column("kl").mean())


# --- log-likelihood differences


def test_difference_shape_by_hand_and_its_asymmetry_is_the_kolmogorov_distance():
    # d = ln q - ln b = nll_b - nll_q = (1, -1, 0, 0): symmetric.
    s = difference_shape([2, 1, 1, 1], [1, 2, 1, 1], n_bins=3, clip=1.0)
    assert (s.mean, s.better, s.worse, s.asymmetry, s.skewness) == (0.0, 0.25, 0.25, 0.0, 0.0)
    assert s.counts.tolist() == [1, 2, 1] and s.edges.tolist() == pytest.approx([-1, -1 / 3, 1 / 3, 1])
    # Everything worse: the distributions of d and -d do not touch.
    assert difference_shape([1, 1], [2, 3]).asymmetry == 1.0
    same = difference_shape([1.0, 2.0], [1.0, 2.0])
    assert same.skewness is None and same.counts.sum() == 2
    d = np.random.default_rng(0).normal(0.2, 1.0, size=300)
    s = difference_shape(10 + d, np.full(300, 10.0))
    assert s.asymmetry == pytest.approx(scipy.stats.ks_2samp(d, -d).statistic)
    assert s.skewness == pytest.approx(scipy.stats.skew(d))
    with pytest.raises(ConfigError):
        difference_shape([1.0], [1.0], n_bins=4)
    with pytest.raises(ConfigError):
        difference_shape([1.0], [1.0], clip=0.0)


# --- planning


def test_items_without_an_event_by_hand():
    # No flips at all: the Wilson bound z²/(n + z²) is 0.05 at n = 19 z² = 72.99.
    assert fewest_without_event(0.05) == 73 and fewest_without_event(0.0) == math.inf
    assert fewest_without_event(0.01) == 381 and wilson(0, 381).high <= 0.01 < wilson(0, 380).high


def test_a_direction_is_planned_for_the_hardest_change_by_hand():
    """Halfway between 0 and -M both claims must have 40 %: z = -0.2533. Other changes need less.

    With D = 0.05 and M = 0.01 they have ``0.005 sqrt(n) = 1.96 sqrt(0.05) - 0.2533 sqrt(0.049975)`` for the one, and
    0.0499 in place of the first 0.05 for the other; with the mean of both, n = 5,818. So many are for D itself. D is
    taken 0.84 standard errors above (50 + 1)/(1,000 + 2): 0.0568; of 5,000 items 0.0528.
    """
    assert items_to_settle(0.05, 1e3, 0.01) == pytest.approx(5_818 * 0.0568 / 0.05, rel=0.02)
    assert items_to_settle(0.05, 5e3, 0.01) == pytest.approx(5_818 * 0.0528 / 0.05, rel=0.01)
    # With more items than that, a sample that is open needs more than those it has.
    assert items_to_settle(0.05, 6_200, 0.01) > 6_200


def test_a_gate_is_planned_over_what_the_first_items_leave_open():
    """With t times the items a mean's end is within the limit with ``Phi((g - 1.96/sqrt(t))/sqrt(1 + 1/t))``.

    Here g is the limit's distance in standard errors of the first items. At 1.5 and t = 10 it is Phi(0.839) = 79.9 %.
    """
    z = 1.959964
    assert math.isinf(times_for_mean(1.49, z))
    t = times_for_mean(1.8, z)
    assert scipy.stats.norm.cdf((1.8 - z / math.sqrt(t)) / math.sqrt(1 + 1 / t)) == pytest.approx(0.8, abs=2e-3)
    # Of many items a share is normal: ((0.05 - 0.048)/sqrt(0.048 0.952/n)) standard errors, as a mean's.
    share, n = 0.048, 90_000
    g = (0.05 - share) / math.sqrt(share * (1 - share) / n)
    assert times_for_share(share, n, 0.05) == pytest.approx(times_for_mean(g, z), rel=0.06)
    change = times_for_change(-0.018, 0.05, 45_000, -0.02)
    assert change == pytest.approx(times_for_mean(0.002 / math.sqrt((0.05 - 0.018**2) / 45_000), z), rel=0.05)


@pytest.mark.ci
def test_planned_power_is_reached_where_the_truth_is_any():
    rng, passed = np.random.default_rng(5), []
    for truth in rng.uniform(0, 0.1, size=4000):
        k = int(rng.binomial(1000, truth))
        if k < 50 and wilson(k, 1000).high > 0.05 and math.isfinite(t := times_for_share(k / 1000, 1000, 0.05)):
            n = math.ceil(1000 * t)
            passed.append(wilson(int(rng.binomial(n, truth)), n).high <= 0.05)
    assert len(passed) > 100 and np.mean(passed) > 0.75


# --- correlation


def test_spearman_against_scipy_and_by_hand():
    # Ranks 1 2 3 4 5 against 2 1 4 3 5: sum of d² is 4, rho = 1 - 6 x 4/(5 x 24) = 0.8.
    found = spearman([1, 2, 3, 4, 5], [20, 10, 40, 30, 50])
    assert found.value == pytest.approx(0.8)
    half = 1.959964 * math.sqrt((1 + 0.32) / 2)
    assert found.interval == pytest.approx((math.tanh(math.atanh(0.8) - half), math.tanh(math.atanh(0.8) + half)))
    assert found.p_value == pytest.approx(scipy.stats.spearmanr([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]).pvalue)
    assert spearman([1, 2, 3, 4, 5], [1, 2, 3, 4, 9]).interval == (1.0, 1.0)
    assert spearman([1, 2, 3], [1, 3, 2]).interval is None


def test_pearson_by_hand_and_against_numpy():
    # x - 2 = (-1, 0, 1), y - 2 = (-1, 1, 0): sum of products 1, both squares 2, r = 1/2.
    assert pearson([1, 2, 3], [1, 3, 2]).value == pytest.approx(0.5)
    rng = np.random.default_rng(0)
    x = rng.normal(size=300)
    y = 0.6 * x + 0.8 * rng.normal(size=300)
    found = pearson(1e6 + x, y)
    assert found.value == pytest.approx(np.corrcoef(x, y)[0, 1])
    # Normal points: Fisher's interval, tanh(atanh r +- z/sqrt(n - 3)), is right too.
    fisher = np.tanh(np.arctanh(found.value) + np.array([-1, 1]) * 1.96 / math.sqrt(297))
    assert found.interval == pytest.approx(fisher, abs=0.02)
    assert pearson(x, y, interval=False).interval is None and pearson(x[:4], y[:4]).interval is None
    assert pearson(x, -x).interval is None  # it is -1 in every resample


@pytest.mark.parametrize(("x", "y"), [([1, 2], [1, 2]), ([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [0.1 + 0.2, 0.3, 0.3])])
def test_no_correlation_is_none(x, y):
    assert pearson(x, y) is None and spearman(x, y) is None
    for correlation, bad in itertools.product((pearson, spearman), ([1.0, math.nan, 2.0], [1.0, 2.0])):
        with pytest.raises(DataError):
            correlation([1.0, 2.0, 3.0], bad)


@QUICK
@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=3, max_size=12))
def test_correlation_properties(points):
    x, y = np.array(points, dtype=float).T
    of_each = {"pearson": lambda a, b: pearson(a, b, resamples=100), "spearman": spearman}
    found, mirrored = ({name: of(*pair) for name, of in of_each.items()} for pair in ((x, y), (y, -3.0 * x + 1.0)))
    for name in of_each:
        if np.ptp(x) == 0 or np.ptp(y) == 0:
            assert found[name] is None
            continue
        assert -1.0 <= found[name].value <= 1.0
        rounding = of_sum(256)  # 12 points, and squares of their distances
        assert mirrored[name].value == pytest.approx(-found[name].value, abs=rounding)


def test_similarity_against_rouge_by_hand():
    # Three instructions. Embeddings in the plane, both answers of a model alike, so that the consistency is 1 and the
    # similarity is the cosine: 1, 0.6, 0. Texts against "a b c d": equal (difference 0), half (1/2), none (1).
    b = np.tile([1.0, 0.0], (3, 2, 1))
    q = np.array([[[1.0, 0.0]] * 2, [[0.6, 0.8]] * 2, [[0.0, 1.0]] * 2])
    rows = [{"task": "t", "item_id": i, "turn": 0, "sample": 0, "prompt": "p", "n_tokens": 4} for i in "xyz"]
    ours = Generations.from_rows([{**row, "text": "a b c d"} for row in rows])
    # A second turn says nothing about the sampled first answers, and is left out.
    later = {**rows[0], "turn": 1, "text": "other words"}
    ours = Generations.concat([ours, Generations.from_rows([later])])
    texts = ("a b c d", "a b e f", "e f g h")
    theirs = [{**row, "text": text} for row, text in zip(rows, texts, strict=True)]
    theirs = Generations.from_rows([*theirs, {**later, "text": "nothing alike"}])
    given = AnswerEmbeddings("t", ("x", "y", "z", "without text"), *(np.concatenate([e, e[:1]]) for e in (b, q)))
    found = headline(
        compute_all(MetricInputs(RunRecords(generations=ours), RunRecords(generations=theirs), embeddings=given))
    )
    r = found["judge/similarity_rouge_pearson"]
    # x = (1, 0.6, 0), y = (0, 0.5, 1): sums of products about the means -0.5, 0.50667, 0.5.
    assert r.value == pytest.approx(-0.5 / math.sqrt((1.36 - 1.6**2 / 3) * 0.5))
    assert found["judge/similarity_rouge_spearman"].value == -1.0
    assert (r.n, r.n_unscored, r.low) == (3, 1, None)
    same = MetricInputs(RunRecords(generations=ours), RunRecords(generations=ours), embeddings=given)
    assert not any("rouge_pearson" in name for name in headline(compute_all(same)))
    other = AnswerEmbeddings("t", ("u", "v", "w"), b, q)
    unknown = MetricInputs(RunRecords(generations=ours), RunRecords(generations=theirs), embeddings=other)
    assert not any("rouge_pearson" in name for name in headline(compute_all(unknown)))


# --- buckets


def test_mean_by_bin_by_hand():
    values = [1.0, 3.0, 2.0, 1.5, 2.5, 2.0, 5.0, 6.0, 7.0]
    found = mean_by_bin([0.1] * 6 + [0.6, 0.7] + [0.9], values, edges=[0, 0.5, 0.8, 1.0])
    assert found.n.tolist() == [6, 2, 1] and found.mean.tolist() == [2.0, 5.5, 7.0]
    assert found.low[0] < 2.0 < found.high[0]
    # Half of the resamples of two values hold one of them only, and one value has none at all.
    assert np.isnan(found.low[1:]).all() and np.isnan(found.high[1:]).all()
    with pytest.raises(ConfigError):
        mean_by_bin([2.0], [1.0])
    with pytest.raises(DataError):
        mean_by_bin([0.1], [1.0, 2.0])


def test_kl_by_confidence_holds_every_item():
    found, tokens = kl_by_confidence(FULL), token_kl_by_confidence(FULL)
    assert found.n.sum() == 60 and tokens.n.sum() == 600
    pooled = headline(compute_all(FULL))
    assert (found.n * found.mean).sum() / 60 == pytest.approx(pooled["distance/kl_mean"].value)
    assert (tokens.n * tokens.mean).sum() / 600 == pytest.approx(pooled["distance/corpus_kl_mean"].value)
    assert token_kl_by_confidence(MetricInputs(FULL.baseline)) is None
    words = FULL.baseline.items.where(family="last_word")
    only = [
        replace(r, items=words, option_scores=r.option_scores.where(task="lambada"))
        for r in (FULL.baseline, FULL.variant)
    ]
    only[1] = replace(only[1], option_distances=FULL.variant.option_distances.where(task="lambada"))
    assert kl_by_confidence(MetricInputs(*only)) is None


# --- text overlap


@QUICK
@given(*[st.text("abcd ", max_size=40) | st.text("aB9 -_'é²İ\n", max_size=20)] * 2)
def test_rouge_equals_rouge_score(reference, text):
    expected = RougeScorer(["rougeL"]).score(reference, text)["rougeL"].fmeasure
    if not re.search("[a-z0-9]", f"{reference}{text}".lower()):
        expected = 1.0
    assert rouge_l([reference], [text])[0] == pytest.approx(expected)


def test_rouge_counts_the_longest_common_subsequence_of_words_quickly():
    # The textbook example: BCBA of 7 and 6 words. "97" is a word of its own, though the code of "a" is 97.
    assert rouge_l(["A B C B D A B"], ["B D C A B A"])[0] == 2 * 4 / (7 + 6)
    assert rouge_l(["a ab 97"], ["97 ab a"])[0] == 2 * 1 / (3 + 3)
    assert rouge_l(["", "", "x"], ["A", "?!", "x"]).tolist() == [0.0, 1.0, 1.0]
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = (list(rng.choice(["x", "xy", "yx"], size=6)) for _ in range(2))
        best = max(
            n for n in range(7) for c in itertools.combinations(a, n) if all(w in it for it in [iter(b)] for w in c)
        )
        assert rouge_l([" ".join(a)], [" ".join(b)])[0] == 2 * best / 12
    words = [str(i % 97) for i in range(3000)]  # shifted by one word: all but one are common
    assert rouge_l([" ".join(words)], [" ".join([*words[1:], "end"])])[0] == 2 * 2999 / 6000


def test_bleu_is_sacrebleus_and_equal_texts_have_all():
    texts = ["the cat sat on the mat today", "a model was made smaller"]
    assert bleu(texts, texts) == pytest.approx(100.0)
    other = ["the cat sat on a mat today", "a model was made small"]
    assert bleu(texts, other) == sacrebleu.corpus_bleu(other, [texts]).score
    for function in (rouge_l, bleu):
        with pytest.raises(DataError):
            function([], [])


def test_texts_are_paired_and_other_prompts_refused():
    ours = FULL.baseline.generations
    rows = ours.table.to_pylist()
    other = Generations.from_rows([{**rows[0], "prompt": "another"}, *rows[1:]])
    with pytest.raises(AlignmentError, match="different prompts"):
        shared_samples(ours, other)
    # A second turn's prompt contains the model's own first answer and may differ.
    later = Generations.from_rows([{**row, "turn": 1} for row in rows])
    changed = Generations.from_rows([{**row, "turn": 1, "prompt": "other"} for row in rows[::-1]])
    found = shared_samples(later, changed)
    assert [t.table.column("text").to_pylist() for t in found] == [[row["text"] for row in rows]] * 2


def test_more_samples_of_one_model_are_left_out_but_not_instructions():
    answers = FULL.baseline.generations.where(task="instructions")
    first = answers.where(sample=0)
    assert len(answers) == 10
    assert [len(t) for t in shared_samples(answers, first)] == [5, 5]
    with pytest.raises(AlignmentError, match=r"different instructions.*'i0'"):
        shared_samples(answers, answers.where(item_id=["i1", "i2", "i3", "i4"]))


def test_one_word_answers_are_not_texts_and_runs_without_records_have_nothing():
    exact = [replace(r, generations=r.generations.where(task="trivia")) for r in (FULL.baseline, FULL.variant)]
    assert "judge/rouge_l" not in headline(compute_all(MetricInputs(*exact)))
    assert compute_all(MetricInputs(RunRecords(), RunRecords(), RunRecords())) == []


def test_a_missing_package_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    monkeypatch.setattr("mlflow_compress.metrics.core.requirements.find_spec", lambda name: None)
    assert unmet(FULL)["text_overlap"] == "the package rapidfuzz is not installed"
