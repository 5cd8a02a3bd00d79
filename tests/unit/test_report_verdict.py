"""The verdict's wording and the numbers' digits, derived by hand.

The verdict's three words, derived by hand, and how often they are wrong.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

from mlflow_compress.decide.direction import harm_of, harm_verdict
from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics import MetricSettings
from mlflow_compress.metrics.core.account import Account
from mlflow_compress.metrics.core.estimates import PairedDifference
from mlflow_compress.metrics.stats.intervals import paired_difference
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.headline import for_users, note_markdown
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
    "clipped": "distance/kl_clipped_mean",
    "above": "distance/kl_above_clip_pct",
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


def test_the_policy_comes_first_then_distances_then_accuracy_which_hides_them():
    results = pooled(n=1000, delta=(-0.004, -0.019, 0.011), p=0.69, flips=(6.1, 4.8, 7.8), kl=(0.021, 0.019, 0.023))
    assert verdict("awq-4bit-g128", results, size_ratio=3.6) == (
        "awq-4bit-g128: fails the default policy: flips 6.1 % > 5; 6.1 % [4.8, 7.8] of 1,000 answers flipped; "
        "KL 0.021 [0.019, 0.023]; accuracy open, -0.4 pt [-1.9, 1.1]; 3.6x smaller"
    )


def test_flips_or_a_moved_distribution_are_not_called_unchanged():
    # 46 right to wrong, 46 wrong to right of 975: 92/975 = 9.4 %, delta exactly 0.
    results = pooled(delta=(0.0, -0.0197, 0.0197), p=1.0, flips=(100 * 92 / 975, 7.8, 11.4), kl=0.05)
    text = verdict("x", results, size_ratio=2.0)
    assert text.startswith("x: fails the default policy: flips 9.44 % > 5; 9.4 % [7.8, 11.4] of 1,000 answers flipped")
    assert "accuracy open, +0.0 pt [-2.0, 2.0]" in text
    assert "unchanged" not in text
    assert "none of 1,000 answers flipped (at most 0.38 %); KL 3.0e-06" in verdict(
        "x", pooled(flips=(0.0, 0.0, 0.3827), kl=3e-6), size_ratio=1.9
    )
    assert "identical" not in verdict("x", pooled(flips=0.0, every=0.1, kl=0.0), size_ratio=1.9)


def test_a_sample_too_small_to_plan_from_says_so():
    # No flip in 20 items: the upper end of Wilson's interval, and of Tango's, is z²/(n + z²) = 3.84/23.84 = 16.1 %.
    kl = {"kl": (0.01, 0.0, 0.02), "clipped": (0.01, 0.0, 0.02), "above": (0.0, 0.0, 0.5)}
    results = pooled(n=20, items=20, delta=(0.0, -0.1611, 0.1611), p=1.0, flips=(0.0, 0.0, 16.11), **kl)
    assert verdict("x", results, size_ratio=2.0) == (
        "x: open under the default policy: needs more than 10 times as many items for flips and accuracy drop; none "
        "of 20 answers flipped (at most 16 %); KL 0.010 [0, 0.020]; accuracy open, +0.0 pt [-16.1, 16.1]; 2.0x smaller"
    )


def test_the_direction_follows_the_interval_and_small_changes_do_not_read_as_zero():
    few = {"flips": 3.0, "kl": 0.1}
    said = verdict("x", pooled(delta=(-0.005, -0.009, -0.001), **few), size_ratio=None)
    assert "; accuracy worse, by less than 1 point, -0.5 pt [-0.9, -0.1]; " in said
    unsure = pooled(delta=(-0.005, -0.018, 0.008), **few)
    assert "; accuracy no worse than 2 points, -0.5 pt" in verdict("x", unsure, size_ratio=None, margin=2)
    assert "; accuracy open, -0.5 pt" in verdict("x", unsure, size_ratio=None)
    assert "; accuracy without an interval, -5.00 pt" in verdict("x", pooled(delta=-0.05, **few), size_ratio=None)
    assert "accuracy without an interval, -0.0200 pt" in verdict("x", pooled(delta=-0.0002), size_ratio=1.0)


def test_identical_models():
    # Nothing flipped in 1,000 items: the interval ends at 3.84/1003.84 = 0.38 %, above the margin of a point.
    same = pooled(delta=(0.0, -0.0038, 0.0038), p=1.0, flips=(0.0, 0.0, 0.4), every=0.0, kl=(0.0, 0.0, 0.0))
    assert verdict("none", same, size_ratio=1.0) == (
        "none: fails the default policy: not compressed; answers identical and KL 0 on all 1,000 items; not compressed"
    )
    assert verdict("c", same, size_ratio=1.0, cache_ratio=3.2).endswith("; same size, its cache 3.2x smaller")
    assert verdict("copy", same, size_ratio=1.0, cache_ratio=1.0).endswith(
        "answers identical and KL 0 on all 1,000 items; same size"
    )


def test_what_is_missing_is_said_to_be_missing_and_why():
    assert verdict("x", {}, size_ratio=None) == (
        "x: open under the default policy: KL has no upper end, as a server shows it; flips not measured; accuracy drop not "
        "measured; flips not measured; KL not measured; accuracy not measured; size not known"
    )
    only_corpus = verdict("x", pooled(corpus=(0.09, 0.08, 0.1)), size_ratio=2.0)
    # Half-width 0.01: first digit 1, so two digits.
    assert only_corpus.endswith("; corpus KL 0.090 [0.080, 0.100]; accuracy not measured; 2.0x smaller")
    # None of the items has options, and so none has a KL.
    generated = pooled(n=152, delta=(-0.02, -0.05, 0.01), p=0.2, flips=(4.0, 1.8, 8.3), items=0)
    assert verdict("x", generated, size_ratio=2.0).endswith(
        "flipped; KL not measured: answers are generated; accuracy open, -2.0 pt [-5.0, 1.0]; 2.0x smaller"
    )
    assert verdict("x", generated | pooled(items=152), size_ratio=2.0).endswith(
        "flipped; KL not measured; accuracy open, -2.0 pt [-5.0, 1.0]; 2.0x smaller"
    )


def test_a_mean_without_an_interval_is_replaced_by_the_clipped_one():
    bounded = {"clipped": (0.015, 0.01, 0.02), "above": (0.33, 0.06, 1.9)}
    assert "; KL per item, clipped, 0.015 [0.010, 0.020]; 0.3 % [0.1, 1.9] of items above 1 nat; " in verdict(
        "x", pooled(kl=0.02, **bounded), size_ratio=2.0
    )
    whole = pooled(kl=(0.02, 0.01, 0.05), **bounded)
    assert "; KL 0.02 [0.01, 0.05]; " in verdict("x", whole, size_ratio=2.0)


def test_a_pruned_model_that_is_saved_dense_and_a_seed_that_was_given_are_said():
    assert verdict("wanda", {}, size_ratio=1.0, sparsity=0.5).endswith("; same size on disk (saved dense), 50 % zeros")
    assert verdict("x", {}, size_ratio=1.0, sparsity=0.046).endswith("; same size")
    assert verdict("x", {}, size_ratio=2.0, served_by=["vllm", "transformers"]).endswith(
        "; 2.0x smaller; read by vllm, transformers"
    )
    assert verdict("x", {}, size_ratio=2.0, served_by=[]).endswith("; 2.0x smaller; no server reads its format")
    assert verdict("x", {}, size_ratio=2.0, sparsity=0.5).endswith("; 2.0x smaller")
    assert verdict("none", {}, size_ratio=1.0, sparsity=0.046).endswith("; not compressed")  # the demo's own zeros
    account = Account(asked=20, setting={"seed": "7 (given)"})
    assert verdict("x", {}, size_ratio=2.0, account=account).endswith("; 2.0x smaller; seed 7 (given)")
    lacks = replace(account, unscored={"the variant gave none": 11})
    said = verdict("x", {}, size_ratio=2.0, account=lacks)
    assert said.startswith("x: open under the default policy: 55 % of the items have no score > 1 %; 2.0x smaller; ")
    assert said.endswith("; 11 of 20 items have no score (the variant gave none: 11); seed 7 (given)")
    assert "seed" not in verdict("x", {}, size_ratio=2.0, account=replace(account, setting={}))


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


def found(c2w, w2c, n, margin=1.0):
    ends = paired_difference(w2c, c2w, n)
    return harm_verdict((w2c - c2w) / n, ends.low, ends.high, discordant=(c2w + w2c) / n, n=n, margin=margin)


@pytest.mark.parametrize(
    ("low", "high", "word", "text"),
    [
        (-0.08, -0.03, "worse", "worse"),
        (-0.009, -0.001, "worse", "worse, by less than 1 point"),
        (-0.009, 0.001, "no worse", "no worse than 1 point"),
        (0.001, 0.009, "no worse", "no worse than 1 point"),
        (-0.01, 0.001, "open", None),  # an end at the margin, or at 0, excludes neither
        (-0.02, 0.0, "open", None),
    ],
)
def test_each_word(low, high, word, text):
    verdict = harm_verdict((low + high) / 2, low, high, discordant=0.1, n=100, margin=1.0)
    assert verdict.word == word
    assert (verdict.items is not None) == (word == "open")
    assert text is None or verdict.text == text


def test_equal_models_are_open_until_enough_items_settle_it():
    """Without a flip Tango's interval ends at -z²/(n + z²): within 1 % from n = 3.8415 x 99 = 380.3."""
    # A flip may come all the same: the share of flips is below 0.42 % with 80 %.
    assert found(0, 0, 380).text == "open (about 840 items would settle it)"
    assert found(0, 0, 381).text == "no worse than 1 point"
    # With a margin of 0, nothing but a gain is no worse, and a change of 0 is no gain for any n.
    assert (
        found(0, 0, 100_000, margin=0.0).text == "open (with a margin of 0 no number of items settles a change near 0)"
    )


def test_items_in_groups_need_as_many_more_as_their_design_effect():
    """Copies of every item in groups of four: four times the items settle what the items without copies would."""
    change = np.random.default_rng(0).choice([-1, 0, 1], 1000, p=[0.05, 0.91, 0.04])

    def of(values, groups):
        difference = PairedDifference.of(values < 0, values > 0, groups)
        value, (low, high) = difference.at(MetricSettings(), 1.0)
        flips = MetricResult("distance/flips_pct", 100 * float((values != 0).mean()), n=len(values))
        delta = MetricResult("quality/accuracy_delta", value, low, high, n=len(values))
        return harm_of({r.name: r for r in (flips, delta)}, margin=0.5)

    alone, copied = of(change, None), of(np.repeat(change, 4), np.repeat(np.arange(1000), 4))
    assert alone.word == copied.word == "open"
    assert copied.items == pytest.approx(4 * alone.items, rel=0.12)  # each is rounded up to two digits; t for z


@pytest.mark.parametrize("margin", [-1.0, 101.0, math.nan])
def test_a_margin_is_0_to_100_points(margin):
    with pytest.raises(ConfigError, match="margin"):
        harm_verdict(0.0, -0.1, 0.1, discordant=0.1, n=100, margin=margin)


def simulated(change, discordant, n, margin, draws=1_500, seed=7):
    """Verdicts on draws of n items with a true change and share of discordant items."""
    lost, gained = (discordant - change) / 2, (discordant + change) / 2
    counts = np.random.default_rng(seed).multinomial(n, [lost, gained, 1 - lost - gained], size=draws)
    return [found(int(c2w), int(w2c), n, margin) for c2w, w2c, _ in counts]


@pytest.mark.parametrize("discordant", [0.03, 0.1, 0.3])
@pytest.mark.parametrize("n", [200, 2_000])
def test_the_words_are_seldom_wrong(discordant, n):
    at_margin = simulated(-0.02, discordant, n, 2.0)
    assert np.mean([verdict.within_margin for verdict in at_margin]) <= 0.04
    assert np.mean([verdict.worse for verdict in simulated(0.0, discordant, n, 2.0)]) <= 0.04


@pytest.mark.parametrize(("change", "discordant"), [(0.0, 0.05), (-0.005, 0.05), (-0.004, 0.09), (-0.015, 0.06)])
def test_the_number_of_items_settles_four_of_five_at_every_change(change, discordant):
    planned = [verdict.items for verdict in simulated(change, discordant, 1000, 1.0) if verdict.items is not None]
    settled = [simulated(change, discordant, n, 1.0, draws=1, seed=i)[0].word != "open" for i, n in enumerate(planned)]
    assert np.mean(settled) >= 0.77


def result(name: str, value: float, low: float | None, high: float | None) -> MetricResult:
    return MetricResult(name=name, value=value, low=low, high=high, n=100)


def sentence(*results: MetricResult) -> str:
    return for_users({one.name: one for one in results})


LONGER = result("judge/length_ratio", 1.2, 1.1, 1.3)
DEFECTS = result("judge/defects_delta_pct", 0.4, -0.7, 1.5)


def test_what_surely_changed_comes_before_what_did_not() -> None:
    assert sentence(DEFECTS, LONGER) == (
        "For users: length of answers 1.20 [1.10, 1.30]; no significant change in answers with a defect."
    )
    fewer = result("tools/right_delta_pct", -1.8, -3.1, -0.7)
    assert sentence(fewer) == "For users: right calls -1.8 pt [-3.1, -0.7]."
    assert "For users: length of answers" in note_markdown("v", {LONGER.name: LONGER})
    assert sentence(DEFECTS) == "For users: no significant change in answers with a defect."
    assert sentence() == sentence(result("judge/length_ratio", 1.2, None, None)) == ""
    same = result("judge/length_ratio", 1.0, 1.0, 1.0)  # the bootstrap of equal answers has no width
    assert sentence(same) == "For users: no significant change in length of answers."


@pytest.mark.parametrize("z", [2.0, 2.2, 2.3])
def test_many_tests_need_stronger_evidence(z: float) -> None:
    """A ratio's error is that of its logarithm. At z it is sure alone from 1.96 on, and beside another from 2.24 on."""
    value, low, high = (math.exp(0.05 * (z + add)) for add in (0.0, -1.959964, 1.959964))
    moved = result("judge/length_ratio", value, low, high)
    assert "no significant change" not in sentence(moved)
    assert (2 * norm.sf(z) * 2 < 0.05) == ("length of answers 1.1" in sentence(moved, DEFECTS))
