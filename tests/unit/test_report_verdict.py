"""The verdict's wording and the numbers' digits, derived by hand."""

from __future__ import annotations

import pytest

from mlflow_compress.metrics.kl_tail import TRUSTED_TOP_PCT
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.numbers import (
    NATS,
    PERCENT,
    SHARE,
    bytes_text,
    interval_text,
    plain,
    ratio_text,
    value_text,
)
from mlflow_compress.reporting.verdict import verdict

NAMES = {
    "delta": "quality/accuracy_delta",
    "p": "quality/mcnemar_p",
    "flips": "distance/flips_pct",
    "every": "distance/all_flips_pct",
    "kl": "distance/kl_mean",
    "top": "distance/kl_share_top_item_pct",
    "items": "distance/kl_items",
    "corpus": "distance/corpus_kl_mean",
}


def pooled(n=1000, **values):
    """Results by key from short names; a tuple is (value, low, high)."""
    found = {}
    for short, given in values.items():
        value, low, high = given if isinstance(given, tuple) else (given, None, None)
        found[NAMES[short]] = MetricResult(NAMES[short], value, low, high, n=n)
    return found


def test_quiet_accuracy_with_many_flips_gets_a_but():
    # 6.1 >= max(2 x 0.4, 0.4 + 1): accuracy alone would have hidden the change. 3,000 items show 1.3 points: enough.
    results = pooled(n=3000, delta=(-0.004, -0.019, 0.011), p=0.69, flips=(6.1, 4.8, 7.8), kl=(0.021, 0.019, 0.023))
    assert verdict("awq-4bit-g128", results, size_ratio=3.6) == (
        "awq-4bit-g128: 3.6x smaller; accuracy -0.4 pt [-1.9, 1.1] (not significant), "
        "but 6.1 % [4.8, 7.8] of answers flipped; KL 0.021 [0.019, 0.023]"
    )


def test_no_but_where_accuracy_moved_or_flips_are_few():
    moved = pooled(delta=(-0.055, -0.08, -0.03), p=0.0001, flips=(8.8, 7.0, 10.9), kl=0.1)
    assert "accuracy -5.5 pt [-8.0, -3.0] (significant), 8.8 % [7.0, 10.9] of answers flipped" in verdict(
        "x", moved, size_ratio=4.0
    )
    # 0.9 flips beside 0.5 points: 0.9 < 2 x 0.5.
    few = pooled(delta=(0.005, -0.01, 0.02), p=0.3, flips=(0.9, 0.5, 1.6), kl=0.1)
    assert "accuracy +0.5 pt [-1.0, 2.0] (not significant), 0.9 % [0.5, 1.6] of answers flipped" in verdict(
        "x", few, size_ratio=4.0
    )


def test_unchanged_accuracy_with_flips_is_not_called_unchanged():
    # 46 right to wrong, 46 wrong to right of 975: 92/975 = 9.4 %, delta exactly 0.
    results = pooled(delta=(0.0, -0.0197, 0.0197), p=1.0, flips=(100 * 92 / 975, 7.8, 11.4), kl=0.05)
    text = verdict("x", results, size_ratio=2.0)
    assert (
        "accuracy +0.0 pt [-2.0, 2.0] (not significant: 1,000 items show a change of 2.7 pt with 80 % power), but 9.4 % [7.8, 11.4] of answers flipped"
        in text
    )
    assert "unchanged" not in text


def test_a_small_sample_says_what_it_cannot_show():
    # No flip in 20 items: the upper end of Wilson's interval, and of Tango's, is z²/(n + z²) = 3.84/23.84 = 16.1 %.
    # All flips one way: K = (1.960 sqrt(20) + 0.842 sqrt(20 + 0.708 - 3.841))/20.708 = 0.5902, and K² = 34.8 %.
    results = pooled(n=20, delta=(0.0, -0.1611, 0.1611), p=1.0, flips=(0.0, 0.0, 16.11), kl=0.01)
    assert verdict("x", results, size_ratio=2.0) == (
        "x: 2.0x smaller; accuracy +0.0 pt [-16.1, 16.1] (not significant: 20 items show a change of 34.8 pt with 80 % power), "
        "no answer flipped (at most 16 %); KL 0.0100"
    )
    # 2 points are what a gate accepts by default: K = (61.98 + 0.842 sqrt(996.9))/1000.7 = 0.0885, times sqrt(5.1 %).
    for flips, said in ((5.1, False), (5.2, True)):
        assert ("80 % power" in verdict("x", pooled(delta=0.0, p=1.0, flips=flips), size_ratio=2.0)) == said
    assert "(not significant: 3 items cannot show a change)" in verdict(
        "x", pooled(n=3, delta=0.0, p=1.0, flips=0.0), size_ratio=2.0
    )


def test_significance_falls_back_to_the_interval_then_to_unknown():
    assert "(significant)" in verdict("x", pooled(delta=(-0.05, -0.08, -0.02)), size_ratio=None)
    assert "(not significant)," in verdict("x", pooled(delta=(-0.05, -0.11, 0.01)), size_ratio=None)
    assert "(significance unknown)" in verdict("x", pooled(delta=-0.05), size_ratio=None)


def test_identical_models():
    same = pooled(delta=(0.0, -0.01, 0.01), p=1.0, flips=(0.0, 0.0, 0.4), every=0.0, kl=(0.0, 0.0, 0.0))
    assert (
        verdict("none", same, size_ratio=1.0) == "none: not compressed; answers identical and KL 0 on all 1,000 items"
    )
    assert verdict("copy", same, size_ratio=1.0).startswith("copy: same size; answers identical")


def test_no_flip_is_not_identical_while_the_distribution_or_a_wrong_answer_moved():
    assert "no answer flipped (at most 0.38 %); KL 3.0e-06" in verdict(
        "x", pooled(flips=(0.0, 0.0, 0.3827), kl=3e-6), size_ratio=1.9
    )
    assert "identical" not in verdict("x", pooled(flips=0.0, every=0.1, kl=0.0), size_ratio=1.9)


def test_what_is_missing_is_said_to_be_missing():
    assert verdict("x", {}, size_ratio=None) == (
        "x: size not known; accuracy not measured, flips not measured; KL not measured"
    )
    only_corpus = verdict("x", pooled(corpus=(0.09, 0.08, 0.1)), size_ratio=2.0)
    # Half-width 0.01: first digit 1, so two digits.
    assert only_corpus.endswith("; corpus KL 0.090 [0.080, 0.100]")


def test_generated_answers_have_no_kl_and_the_verdict_says_why():
    # None of the items has options, and so none has a KL.
    generated = pooled(n=152, delta=(-0.02, -0.05, 0.01), p=0.2, flips=(4.0, 1.8, 8.3), items=0)
    assert verdict("x", generated, size_ratio=2.0).endswith("flipped; KL not measured: answers are generated")
    assert verdict("x", generated | pooled(items=152), size_ratio=2.0).endswith("flipped; KL not measured")


def test_a_mean_that_hangs_on_one_item_says_so():
    kl = {"kl": (0.02, 0.01, 0.05)}
    assert verdict("x", pooled(**kl, top=18.4), size_ratio=2.0).endswith("[0.01, 0.05] (18 % of it from one item)")
    below = 0.99 * TRUSTED_TOP_PCT
    assert verdict("x", pooled(**kl, top=below), size_ratio=2.0).endswith("[0.01, 0.05]")


def test_a_pruned_model_that_is_saved_dense():
    assert verdict("wanda", {}, size_ratio=1.0, sparsity=0.5).startswith(
        "wanda: same size on disk (saved dense), 50 % zeros; "
    )
    assert verdict("x", {}, size_ratio=1.0, sparsity=0.046).startswith("x: same size; ")
    assert verdict("x", {}, size_ratio=2.0, sparsity=0.5).startswith("x: 2.0x smaller; ")
    assert verdict("none", {}, size_ratio=1.0, sparsity=0.046).startswith(
        "none: not compressed; "
    )  # the demo's own zeros


def test_small_accuracy_changes_do_not_read_as_zero():
    assert "accuracy -0.0200 pt" in verdict("x", pooled(delta=-0.0002), size_ratio=1.0)


@pytest.mark.parametrize(
    ("ratio", "words"),
    [(1.0, "same size"), (0.998, "same size"), (3.57, "3.6x smaller"), (1.04, "1.04x smaller"), (0.5, "2.0x larger")],
)
def test_size_words(ratio, words):
    assert ratio_text(ratio) == words


def test_digits_follow_the_interval():
    # Half-width 0.034: one digit, so two decimals; 0.0123: first digit 1, so two digits, three decimals.
    assert interval_text(MetricResult("k", 0.5, 0.466, 0.534), NATS, difference=False) == "0.50 [0.47, 0.53]"
    assert interval_text(MetricResult("k", 0.5, 0.4877, 0.5123), NATS, difference=False) == "0.500 [0.488, 0.512]"
    assert interval_text(MetricResult("k", -0.004, -0.019, 0.011), SHARE, difference=True) == "-0.4 pt [-1.9, 1.1]"
    assert interval_text(MetricResult("k", 12.5, 7.72, 19.6), PERCENT, difference=False) == "12.5 % [7.7, 19.6]"
    assert interval_text(MetricResult("k", 0.0, 0.0, 0.0), NATS, difference=False) == "0"
    assert value_text(MetricResult("k", 0.575, 0.486, 0.66), SHARE) == "57.5 %"
    assert plain(-0.0004, 1, signed=True) == "-0.0004"
    assert bytes_text(15_700_000) == "15.7 MB"
    assert bytes_text(999) == "999 B"
