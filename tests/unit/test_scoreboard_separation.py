"""Which variants can be told apart: hand-derived tests, identities, and error rates on real divergences."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_1samp

from mlflow_compress.decide.separation import DocumentsTest, ItemScores, by_document, groups_not_told_apart, separate
from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics import MetricInputs
from mlflow_compress.metrics.stats.significance import mcnemar_exact, paired_mean
from mlflow_compress.metrics.stats.stratified import Design
from mlflow_compress.records import RunRecords, TokenDistances, TokenScores
from tests.metric_records import QUICK
from tests.scored_variants import scores

REAL = Path(__file__).resolve().parents[2] / "benchmarks" / "kl_per_item.npz"


def two(a, b):
    [pair] = separate([("a", a), ("b", b)])
    return pair


def test_the_paired_mean_is_students() -> None:
    """Differences 1, 2, 3: mean 2, standard error 1/sqrt(3), t = 3.4641 with 2 degrees of freedom, p = 0.0742.

    The 97.5 % quantile of that distribution is 4.3027, so the half-width is 4.3027/sqrt(3) = 2.4841.
    """
    found = paired_mean([1.0, 2.0, 3.0])
    assert found is not None and found.n == 3 and found.value == 2.0
    assert found.p_value == pytest.approx(0.0742, abs=5e-5)
    assert found.interval == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-4)
    equal = paired_mean([0.0] * 5)
    assert equal is not None and (equal.value, equal.interval, equal.p_value) == (0.0, None, 1.0)
    assert paired_mean([0.1] * 5) is None and paired_mean([0.1]) is None
    with pytest.raises(DataError):
        paired_mean([0.1, np.nan])


@QUICK
@given(st.lists(st.floats(-5, 5).map(lambda x: round(x, 3)), min_size=2, max_size=40))
def test_interval_and_p_value_agree_and_the_order_of_the_two_does_not_matter(d: list[float]) -> None:
    found, reverse = paired_mean(d), paired_mean([-x for x in d])
    assert (found is None) == (reverse is None)
    if found is None or reverse is None:
        return
    assert reverse.value == -found.value and reverse.p_value == pytest.approx(found.p_value)
    if found.interval is None or reverse.interval is None:
        assert found.interval is reverse.interval is None and not any(d)
        return
    assert reverse.interval == pytest.approx((-found.interval.high, -found.interval.low))
    if abs(found.p_value - 0.05) > 1e-9:
        assert (found.p_value < 0.05) == (not found.interval.low <= 0 <= found.interval.high)


def test_a_variant_is_not_told_apart_from_itself() -> None:
    rng = np.random.default_rng(1)
    same = scores(rng.integers(0, 2, 300), rng.exponential(size=300))
    pair = two(same, same)
    assert pair.tied and not pair.told_apart
    for found in (pair.kl, pair.correctness):
        assert found is not None and (found.value, found.p, found.p_holm) == (0.0, 1.0, 1.0)
    assert pair.kl.low is None and pair.kl.high is None  # items that were not seen may differ
    assert pair.correctness.low < 0 < pair.correctness.high


def test_the_item_that_speaks_most_against_a_difference_counts_twice() -> None:
    """A sample may lack the heaviest item: of 0.2 once and -0.01 40 times, the 0.2 stands twice."""
    d = np.array([*[-0.01, -0.03] * 20, 0.2])
    pair = two(scores([1] * 41, np.ones(41)), scores([1] * 41, 1 + d))
    alone, twice = ttest_1samp(d, 0.0).pvalue, ttest_1samp([*d, 0.2], 0.0).pvalue
    assert pair.kl.p == pytest.approx(twice) and twice > 2 * alone
    assert (pair.kl.value, pair.kl.n) == (pytest.approx(d.mean()), 41)
    # Where it turns the difference round, nothing is told apart.
    d = np.array([*[-0.01, -0.03] * 5, 0.15])
    turned = two(scores([1] * 11, np.ones(11)), scores([1] * 11, 1 + d)).kl
    assert d.mean() < 0 < d.sum() + 0.15 and turned is not None and turned.p == 1.0


def test_items_with_a_text_in_common_are_compared_as_groups() -> None:
    """Ten copies of each of 40 items tell what the 40 do; copies of 19 tell nothing."""
    rng = np.random.default_rng(2)
    right, kl, other = rng.integers(0, 2, 40), rng.exponential(size=40), rng.exponential(size=40)
    alone = two(scores([1] * 40, kl), scores(right, other))
    groups = np.repeat(np.arange(40), 10)
    copied = two(scores([1] * 400, kl.repeat(10), groups), scores(right.repeat(10), other.repeat(10), groups))
    assert (copied.kl.value, copied.kl.p) == (pytest.approx(alone.kl.value), pytest.approx(alone.kl.p))
    assert (copied.kl.low, copied.kl.high) == pytest.approx((alone.kl.low, alone.kl.high))
    assert copied.kl.n == copied.correctness.n == 400
    assert alone.correctness is not None and copied.correctness.p == pytest.approx(alone.correctness.p)
    few = two(
        scores([1] * 190, kl[:19].repeat(10), groups[:190]), scores([0] * 190, other[:19].repeat(10), groups[:190])
    )
    assert few.kl is few.correctness is None and not few.told_apart and not few.tied  # nothing was tested


def test_differences_are_the_second_minus_the_first() -> None:
    """Of ten items, five go from wrong to right and none back: +0.5, and McNemar's mid-p is 2/2^5 - 1/2^5."""
    pair = two(scores([0] * 5 + [1] * 5, np.arange(10)), scores([1] * 10, np.arange(10) + np.tile([1.0, 3.0], 5)))
    assert (pair.correctness.value, pair.correctness.n) == (0.5, 10)
    assert pair.correctness.p == pytest.approx(1 / 32)
    assert pair.kl.value == 2.0 and pair.kl.low > 0
    assert pair.told_apart  # by KL: t = 2/(1.0541/sqrt(10)) = 6


def test_p_values_are_corrected_over_both_tests_of_all_pairs() -> None:
    """Three variants: three pairs, six tests. Holm multiplies the smallest p by six."""
    base = [0] * 20
    half = scores([1] * 8 + [0] * 12, [0.1] * 20)
    pairs = separate([("a", scores(base, [0.1] * 20)), ("b", half), ("c", half)])
    assert [(p.first, p.second) for p in pairs] == [("a", "b"), ("a", "c"), ("b", "c")]
    raw = [p.correctness.p for p in pairs]  # type: ignore[union-attr]
    assert raw == pytest.approx([1 / 2**8, 1 / 2**8, 1.0])
    assert [p.correctness.p_holm for p in pairs] == [6 * raw[0], 6 * raw[0], 1.0]  # type: ignore[union-attr]
    assert [p.told_apart for p in pairs] == [True, True, False]


def test_what_was_not_measured_is_no_difference_and_items_are_aligned_by_their_ids() -> None:
    """Without KL there is no test of it; an item that one of both did not answer is left out."""
    pair = two(scores([1, 0, np.nan], [np.nan] * 3), scores([1, 1, 1], [np.nan] * 3))
    assert pair.kl is None and pair.correctness is not None and pair.correctness.n == 2
    assert separate([("a", scores([1], [0.1]))]) == ()
    a = scores([1, 0, 1], [0.1, 0.2, 0.3])
    order = np.array([2, 0, 1])
    pair = two(a, a[order])
    assert pair.kl is not None and pair.kl.value == 0 and pair.kl.p == 1
    with pytest.raises(AlignmentError, match="not evaluated on the same items"):
        two(a, scores([1, 0], [0.1, 0.2]))


def test_groups_are_neighbours_of_which_no_two_are_told_apart() -> None:
    """Of a < b < c < d, where a and c, a and d, b and d differ: a-b, b-c, c-d."""
    apart = {frozenset("ac"), frozenset("ad"), frozenset("bd")}
    assert groups_not_told_apart("abcd", apart) == (("a", "b"), ("b", "c"), ("c", "d"))
    assert groups_not_told_apart("abcd", {frozenset("ad")}) == (("a", "b", "c"), ("b", "c", "d"))
    assert groups_not_told_apart("abcd", set()) == (("a", "b", "c", "d"),)
    assert groups_not_told_apart("ab", {frozenset("ab")}) == () == groups_not_told_apart("", set())


@QUICK
@given(st.integers(0, 6), st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_every_pair_of_a_group_is_alike_and_no_group_can_grow(n: int, pairs: set[tuple[int, int]]) -> None:
    order = [str(i) for i in range(n)]
    apart = {frozenset((str(a), str(b))) for a, b in pairs if a != b}
    groups = groups_not_told_apart(order, apart)

    def alike(members: list[str]) -> bool:
        return not any(frozenset((a, b)) in apart for a in members for b in members if a != b)

    runs = [order[i:j] for i in range(n) for j in range(i + 2, n + 1) if alike(order[i:j])]
    largest = [run for run in runs if not any(set(run) < set(other) for other in runs)]
    assert sorted(map(list, groups)) == sorted(largest)


def test_on_real_divergences_errors_are_as_rare_as_promised() -> None:
    """Real KL per item of 8 variants, 300 items drawn 100 times for each of 28 pairs.

    Two variants whose values are exchanged at random per item are the same: 5 % may be told apart (measured with 400
    draws: 4.3 %). The interval of a true difference holds the mean over all items in nearly 95 % (measured: 93.7 %),
    because one item may hold a large part of the mean.
    """
    real = np.load(REAL)
    names = [name for name in real.files if name.endswith("/pooled")]
    rng = np.random.default_rng(0)
    false, missed, draws = 0, 0, 0
    for first, second in itertools.combinations(names, 2):
        difference = real[second] - real[first]
        for _ in range(100):
            d = rng.choice(difference, 300)
            null, true = paired_mean(d * rng.choice([-1.0, 1.0], 300)), paired_mean(d)
            false += null.p_value < 0.05
            missed += not true.interval.low <= difference.mean() <= true.interval.high
            draws += 1
    assert draws == 28 * 100
    assert false / draws <= 0.055
    assert missed / draws <= 0.08


def drawn(items: ItemScores, strata: np.ndarray, counts: Sequence[int]) -> ItemScores:
    """The first items of each stratum, as many as were drawn from it."""
    place = np.array([(strata[:i] == code).sum() for i, code in enumerate(strata)])
    rows = np.flatnonzero(place < np.array(counts)[strata])
    n_drawn = np.minimum(counts, np.bincount(strata))
    design = Design(strata[rows], np.bincount(strata)[strata[rows]], n_drawn[strata[rows]])
    return replace(items[rows], design=design)


def test_drawn_variants_are_compared_on_the_items_that_both_have_each_by_what_it_stands_for() -> None:
    rng = np.random.default_rng(0)
    strata = np.repeat([0, 1], [100, 300])
    order = rng.permutation(400)
    strata, kl = strata[order], np.where(strata[order] == 0, 0.5, 0.1) * rng.random((2, 400))
    a, b = scores([1] * 400, kl[0]), scores((strata == 1).astype(float).tolist(), kl[1] + (strata == 0))
    first, second = drawn(a, strata, [60, 30]), drawn(b, strata, [40, 50])
    x, y = first.in_common(second)
    assert x.design is not None and len(x.task) == 70 and x.item_id.tolist() == y.item_id.tolist()
    weight = np.where(x.design.stratum == 0, 100 / 40, 300 / 30)
    pair = two(first, second)
    assert pair.kl is not None and pair.kl.n == 70 and pair.told_apart
    assert pair.kl.value == pytest.approx((weight @ (y.kl - x.kl)) / 400)
    # A quarter of the items differ, but 40 of the 70 in common.
    assert pair.correctness is not None and pair.correctness.value == pytest.approx(-0.25)
    # Of a variant that was scored on all items, those of the other are taken.
    whole = two(a, second)
    assert whole.kl is not None and whole.kl.n == 90


def test_drawn_variants_that_are_equally_close_are_told_apart_no_more_often_than_promised() -> None:
    rng = np.random.default_rng(1)
    strata = np.repeat([0, 1, 2], [200, 300, 500])
    scale, wrong = np.array([0.5, 0.1, 0.02])[strata], np.array([0.2, 0.05, 0.0])[strata]
    apart = np.zeros(2)
    for _ in range(400):
        a, b = (scores((rng.random(1000) > wrong).tolist(), scale * rng.gamma(0.5, size=1000)) for _ in range(2))
        pair = two(drawn(a, strata, [120, 60, 40]), drawn(b, strata, [100, 80, 40]))
        apart += [pair.kl.p < 0.05, pair.correctness.p < 0.05]
    assert (apart / 400 <= 0.075).all(), apart / 400


def test_pairs_whose_outcome_with_all_items_is_open_need_more_items_and_the_others_none() -> None:
    """Whoever is settled on drawn items is told apart, or not, as with all 2,000."""
    rng = np.random.default_rng(0)
    strata = np.repeat([0, 1], [400, 1600])
    kl = rng.exponential(0.1, 2000)
    agree, settled = 0, 0
    for draw in range(60):
        order = rng.permutation(2000)
        shift = (0.0, 0.004, 0.03)[draw % 3]  # equal, on the border, and far apart
        other = kl + shift + rng.normal(0, 0.05, 2000)
        a, b = (scores([1] * 2000, x[order]) for x in (kl, other))
        every = two(a, b)
        some = two(*(drawn(x, strata[order], [200, 400]) for x in (a, b)))
        assert every.kl is not None and some.kl is not None and every.more_items is None
        if some.more_items is None:
            settled += 1
            agree += some.kl.significant == every.kl.significant
        else:
            assert 600 < some.more_items <= 2000
            assert not some.kl.significant or some.kl.p_holm > 0.01
    assert settled >= 20 and agree >= settled - 1


def test_items_that_were_drawn_in_another_order_are_refused() -> None:
    strata, items = np.repeat([0, 1], [50, 50]), scores([1] * 100, np.linspace(0, 1, 100).tolist())
    order = np.arange(100)[::-1]
    with pytest.raises(AlignmentError, match="not drawn in the same order"):
        two(drawn(items, strata, [10, 10]), drawn(items[order], strata[order], [10, 10]))


def read(kl: Sequence[float], windows: Sequence[str]) -> MetricInputs:
    """Return a variant's records of running text, one token a window."""
    n = len(kl)
    key = {"task": ["text"] * n, "item_id": list(windows), "position": np.ones(n)}
    flat = {"target": np.zeros(n), "nll": np.ones(n), "p_target": np.full(n, 0.5), "argmax": np.zeros(n)}
    tokens = TokenScores.from_columns({**key, **flat, "entropy": np.zeros(n)})
    still = dict.fromkeys(("kl_reverse", "js", "tv", "same_top", "top10", "rbo10"), np.zeros(n))
    moved = TokenDistances.from_columns({**key, "kl": np.array(kl), **still})
    return MetricInputs(RunRecords(token_scores=tokens), RunRecords(token_scores=tokens, token_distances=moved))


@pytest.mark.parametrize(
    ("sizes", "against", "by_window", "published"),
    [((7, 6, 6, 6), (1, 1, 1, 2), "0.004077", 0.125), ((7, 5, 5), (2, 1, 1), "0.0490", 0.25)],
)
def test_windows_of_one_document_are_no_independent_evidence(
    sizes: Sequence[int], against: Sequence[int], by_window: str, published: float
) -> None:
    """The published p-values of a panel of 25 windows from four documents, and of its 17 windows from three.

    Of the windows, 20 and 13 agree with their document's mean; both documents' and windows' signs are tested exactly.
    Source: malaiwah/quant-fidelity-suite, `jointstd/stats.py`, document_level_paired (K6 against K8).
    """
    signs = [-1.0 if n < few else 1.0 for size, few in zip(sizes, against, strict=True) for n in range(size)]
    windows = [f"{document}.{n}" for document, size in enumerate(sizes) for n in range(size)]
    other = read(np.full(len(signs), 0.02), windows)
    found = by_document(read(0.02 + 0.001 * np.array(signs), windows), other)
    assert found == DocumentsTest(first=0, second=len(sizes), equal=0) and found.p == published
    assert f"{mcnemar_exact(sum(against), sum(sizes) - sum(against)):.{len(by_window) - 2}f}" == by_window
    same = by_document(other, other)
    assert same == DocumentsTest(first=0, second=0, equal=len(sizes)) and same.p == 1.0
    assert by_document(other, MetricInputs(other.baseline)) is None
    with pytest.raises(AlignmentError):
        by_document(other, read([0.02], ["0.0"]))
