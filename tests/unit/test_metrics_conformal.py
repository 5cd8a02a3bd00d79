"""Conformal sets and ConSCompF: by hand, against MAPIE's definitions, and by simulation."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mapie.classification import SplitConformalClassifier
from scipy.special import softmax
from sklearn.base import BaseEstimator, ClassifierMixin

from mlflow_compress.errors import ConfigError, DataError, UnsupportedError
from mlflow_compress.metrics.conscompf import consistency, principal_components, similarity
from mlflow_compress.metrics.stats.conformal import (
    conformal,
    conformal_quantile,
    conformity_scores,
    coverage_by_class,
    network_argsort,
    repeated_splits,
    resampled_quantiles,
    sizes_and_coverage,
    split,
)
from tests.metric_records import QUICK
from tests.roundoff import of_sum

P = np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])


def sets_of(p: np.ndarray, threshold: float, score: Any) -> np.ndarray:
    """Return the options in each set, shape (n, n_options): an option is in it where it is covered as the gold one."""
    every = [sizes_and_coverage(p, np.full(len(p), option), [threshold], score)[1][0] for option in range(p.shape[1])]
    return np.stack(every, axis=1) == 1.0


def test_scores_by_hand():
    # LAC: 1 - p_y. APS: mass down to y: gold 1 of row 0 is second, 0.5 + 0.3; gold 2 of row 1 is first, 0.7.
    np.testing.assert_allclose(conformity_scores(P, [1, 2], "lac"), [0.7, 0.3])
    np.testing.assert_allclose(conformity_scores(P, [1, 2], "aps"), [0.8, 0.7])


def test_quantile_by_hand():
    # n = 9, alpha = 0.1: k = ceil(10 x 0.9) = 9, the largest. n = 8: k = ceil(8.1) = 9 > 8, no finite threshold.
    s = np.arange(1.0, 10.0)
    assert conformal_quantile(s, 0.1) == 9.0
    assert conformal_quantile(s[:8], 0.1) == math.inf
    assert conformal_quantile(s[:8], 0.1, mode="reference") == math.inf
    # n = 19, alpha = 0.2: k = ceil(20 x 0.8) = 16.
    assert conformal_quantile(np.arange(19.0), 0.2) == 15.0
    with pytest.raises(ConfigError):
        conformal_quantile(s, 1.0)


@QUICK
@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.sampled_from([0.05, 0.1, 0.25, 0.5]))
def test_the_quantile_holds_back_what_it_promises(values, alpha):
    # At least ceil((n + 1)(1 - alpha)) of the scores lie at or below it, and fewer lie below any smaller score.
    q, n = conformal_quantile(np.array(values, dtype=float), alpha), len(values)
    wanted = math.ceil(round((n + 1) * (1 - alpha), 9))
    if wanted > n:
        assert q == math.inf
    else:
        assert sum(v <= q for v in values) >= wanted > sum(v < q for v in values)
    assert conformal_quantile(np.array(values, dtype=float), alpha, mode="reference") >= q or q == math.inf


def test_sets_and_result_by_hand():
    # LAC at 0.75: p >= 0.25. APS at 0.8: cumulative 0.5, 0.8 (in), 1.0 (out); row 1: 0.7 (in), 0.9 (out).
    assert sets_of(P, 0.75, "lac").tolist() == [[True, True, False], [False, False, True]]
    assert sets_of(P, 0.8 + 1e-12, "aps").tolist() == [[True, True, False], [False, False, True]]
    # A threshold below every option gives the most probable one; an infinite one gives them all.
    assert sets_of(P, 0.1, "aps").sum(axis=1).tolist() == [1, 1]
    assert sets_of(P, math.inf, "lac").all() and sets_of(P, math.inf, "aps").all()
    # Calibrate on row 0 only is impossible at alpha = 0.1, so keep a threshold: sets {0, 1} and {2}.
    r = conformal(P, [1, 2], calibration=[0], test=[0, 1], score="lac", threshold=0.75)
    assert (r.accuracy, r.set_size, r.coverage) == (0.5, 1.5, 1.0)
    assert r.uacc == pytest.approx(0.5 / 1.5 * math.sqrt(3))
    assert coverage_by_class(r, [1, 2]) == {1: 1.0, 2: 1.0}
    assert conformal(P, [1, 2], calibration=[0], test=[1], score="lac").threshold == math.inf
    with pytest.raises(DataError):
        coverage_by_class(r, [1])


def test_ties_by_hand_here_and_in_the_reference():
    p = np.array([[0.4, 0.4, 0.2]])
    np.testing.assert_allclose(conformity_scores(p, [0], "aps"), [0.4])
    np.testing.assert_allclose(conformity_scores(p, [0], "aps", mode="reference"), [0.8])
    # Six equal keys stay in place through every stage of the network but those where padding (infinity) passes.
    order = network_argsort(np.array([[2.0, 1.0, 2.0, 1.0]]))
    assert sorted(order[0, :2].tolist()) == [1, 3] and sorted(order[0, 2:].tolist()) == [0, 2]
    with pytest.raises(UnsupportedError):
        network_argsort(np.zeros((1, 9)))


@QUICK
@given(st.lists(st.permutations(range(6)), min_size=1, max_size=5))
def test_reference_order_sorts(rows):
    values = np.array(rows, dtype=float)
    np.testing.assert_array_equal(network_argsort(values), np.argsort(values, axis=1))


@pytest.mark.parametrize("bad", [[[0.5, 0.6]], [[1.5, -0.5]], [0.5, 0.5], [[math.nan, 1.0]]])
def test_broken_probabilities_are_refused(bad):
    with pytest.raises(DataError):
        conformity_scores(bad, [0], "lac")
    with pytest.raises(DataError):
        conformity_scores(P, [0, 3], "lac")


def test_split_is_seeded_and_complete():
    calibration, test = split(11)
    assert len(calibration) == 5 and sorted([*calibration, *test]) == list(range(11))
    assert split(11)[0].tolist() == calibration.tolist()
    with pytest.raises(DataError):
        split(1)


def _simulated(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Golds drawn from the stated probabilities, distorted: conformal sets must cover anyway."""
    rng = np.random.default_rng(seed)
    logits = 2.0 * rng.normal(size=(n, 6))
    gold = np.array([rng.choice(6, p=p) for p in softmax(logits, axis=-1)])
    return softmax(3.0 * logits, axis=-1), gold


@pytest.mark.parametrize("score", ["lac", "aps"])
def test_coverage_is_what_was_asked_for(score):
    p, gold = _simulated(600, 1)
    runs = repeated_splits(p, gold, score, n_splits=200, alpha=0.2)
    # Expected coverage is at least k/(n + 1) = 241/301 = 0.8007; 200 splits of 300 test items have an error of 0.3 %.
    # Discrete sets with the "or top-1" rule may only exceed it; LAC is tight.
    assert runs["coverage"].mean() > 0.79
    if score == "lac":
        assert runs["coverage"].mean() < 0.83
    assert runs["uacc"].shape == (200,)
    with pytest.raises(ConfigError):
        repeated_splits(p, gold, score, n_splits=0)


@QUICK
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=40))
def test_a_resamples_threshold_is_that_of_its_repeated_scores(rows):
    scores, counts = np.array([score / 10 for score, _ in rows]), [count for _, count in rows]
    counts[0] += len(rows) - sum(counts)  # a resample is as large as the sample
    if counts[0] < 0:
        return
    found = resampled_quantiles(scores, np.array([counts, [1.0] * len(rows)]))
    assert found.tolist() == [conformal_quantile(np.repeat(scores, counts)), conformal_quantile(scores)]


def test_sizes_and_coverage_at_many_thresholds_are_those_at_each():
    p, gold = _simulated(50, 0)
    thresholds = [0.1, 0.5, 0.9, math.inf]
    for score in ("lac", "aps"):
        sizes, covered = sizes_and_coverage(p, gold, thresholds, score)
        for row, threshold in enumerate(thresholds):
            sets = sets_of(p, threshold, score)
            alone = conformal(p, gold, calibration=[0], test=np.arange(50), score=score, threshold=threshold)
            assert sizes[row].tolist() == sets.sum(axis=1).tolist() == alone.size.tolist()
            assert covered[row].tolist() == sets[np.arange(50), gold].tolist() == alone.covered.tolist()


def test_intervals_of_the_set_size_cover_only_where_thresholds_are_taken_anew():
    """400 data sets of 200 items, intervals of 95 %: thresholds held fixed cover 48 %, taken anew 95 %."""
    rng, n, n_draws, resamples = np.random.default_rng(0), 200, 400, 200
    calibration, test = split(n)
    sizes, ends = [], {"fixed": [], "anew": []}
    for draw in range(n_draws):
        p, gold = _simulated(n, 1000 + draw)
        counts = [rng.multinomial(100, [0.01] * 100, size=resamples).astype(float) for _ in range(2)]
        scores = conformity_scores(p[calibration], gold[calibration], "lac")
        thresholds, at = np.unique(
            [conformal_quantile(scores), *resampled_quantiles(scores, counts[0])], return_inverse=True
        )
        table = sizes_and_coverage(p[test], gold[test], thresholds, "lac")[0]
        sizes.append(table[at[0]].mean())
        for how, rows in (("fixed", at[:1]), ("anew", at[1:])):
            ends[how].append(np.quantile((counts[1] * table[rows]).sum(axis=1) / 100, [0.025, 0.975]))
    truth = np.mean(sizes)
    held = {how: np.mean([low <= truth <= high for low, high in found]) for how, found in ends.items()}
    assert held["fixed"] < 0.6 and 0.92 <= held["anew"] <= 0.98, held


def test_sets_against_a_plain_recomputation():
    # Item by item with Python's sorted, the way the definition reads.
    p, gold = _simulated(200, 7)
    calibration, test = split(200)
    for score in ("lac", "aps"):

        def mass_down_to(row, option, score=score):
            if score == "lac":
                return 1.0 - row[option]
            ahead = sorted(range(6), key=lambda o: (-row[o], o))
            return math.fsum(row[o] for o in ahead[: ahead.index(option) + 1])

        scores = sorted(mass_down_to(p[i], gold[i]) for i in calibration)
        threshold = scores[math.ceil(101 * 0.9) - 1]
        sizes, covered = [], []
        for i in test:
            inside = {o for o in range(6) if mass_down_to(p[i], o) <= threshold + of_sum(6)} or {int(p[i].argmax())}
            sizes.append(len(inside))
            covered.append(gold[i] in inside)
        found = conformal(p, gold, calibration=calibration, test=test, score=score)
        assert found.threshold == pytest.approx(threshold, abs=of_sum(6))
        assert found.set_size == pytest.approx(
            np.mean(sizes), abs=1.01 / 100
        )  # a set at the threshold itself may differ
        assert found.coverage == pytest.approx(np.mean(covered), abs=1.01 / 100)


def test_similarity_by_hand():
    # Two instructions, two answers each, in the plane. a: (1,0),(0,1): consistency 0, mean on the diagonal.
    # b: (1,0),(1,0): consistency 1. y = cos 45 deg, c = (0 + 1)/2: y c + 1 - c = 0.5 y + 0.5.
    a = np.array([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]]])
    found = similarity(a, np.array([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 2.0], [0.0, 1.0]]]))
    y = math.sqrt(0.5)
    np.testing.assert_allclose(consistency(a), [0.0, 1.0], atol=of_sum(8))
    np.testing.assert_allclose(found.cosine, [y, 0.0], atol=of_sum(8))
    np.testing.assert_allclose(found.per_instruction(), [0.5 * y + 0.5, 0.0], atol=of_sum(16))
    # Rescaled: c = (0.5, 1) becomes (0, 1): weights (0, 1), so 1 and 0.
    np.testing.assert_allclose(found.per_instruction("reference"), [1.0, 0.0], atol=of_sum(16))
    assert found.mean("unweighted") == pytest.approx(y / 2)


@QUICK
@given(st.integers(0, 1000))
def test_similarity_is_symmetric_and_scale_free(seed):
    a, b = np.random.default_rng(seed).normal(size=(2, 4, 3, 5))
    rounding = of_sum(64)  # 3 answers of 5 numbers, their lengths, and the pairs
    for weighting in ("equation4", "reference", "unweighted"):
        assert similarity(a, b).mean(weighting) == pytest.approx(similarity(b, a).mean(weighting), abs=rounding)
        assert similarity(a, a).mean(weighting) == pytest.approx(1.0, abs=rounding)
    np.testing.assert_allclose(consistency(7.0 * a), consistency(a), atol=rounding)
    # The closed form of the pairwise mean against the pairs themselves.
    u = a / np.linalg.norm(a, axis=-1, keepdims=True)
    pairs = [(u[:, i] * u[:, j]).sum(-1) for i in range(3) for j in range(i)]
    np.testing.assert_allclose(consistency(a), np.mean(pairs, axis=0), atol=rounding)


def test_equal_consistency_is_not_divided_by_zero():
    a = np.array([[[1.0, 0.0], [0.0, 1.0]]])
    found = similarity(a, a[:, ::-1])
    assert found.mean("reference") == found.mean("equation4") == pytest.approx(1.0)


def test_components_keep_the_distances_of_three_models():
    matrix = np.array([[1.0, 0.95, 0.2], [0.95, 1.0, 0.3], [0.2, 0.3, 1.0]])
    points = principal_components(matrix)
    assert points.shape == (3, 2)
    assert np.linalg.norm(points[0] - points[1]) < np.linalg.norm(points[0] - points[2])
    # All distances between rows survive, since three points span a plane.
    assert np.linalg.norm(points[0] - points[2]) == pytest.approx(np.linalg.norm(matrix[0] - matrix[2]))
    with pytest.raises(DataError):
        principal_components(matrix, 4)


def test_broken_embeddings_are_refused():
    ok = np.ones((2, 2, 3))
    for bad in (
        np.zeros((2, 2, 3)),
        np.ones((2, 1, 3)),
        np.ones((2, 3)),
        np.ones((3, 2, 3)),
        np.full((2, 2, 3), np.nan),
    ):
        with pytest.raises(DataError):
            similarity(ok, bad)


class Given(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier whose inputs are its probabilities."""

    def __init__(self, n_options: int = 6) -> None:
        self.n_options = n_options

    def fit(self, probabilities: Any, gold: Any) -> "Given":
        """Learn nothing."""
        self.classes_ = np.arange(self.n_options)
        return self

    def predict_proba(self, probabilities: Any) -> Any:
        """Return what was given."""
        return probabilities

    def predict(self, probabilities: Any) -> Any:
        """Return the most probable option."""
        return probabilities.argmax(axis=1)


@pytest.mark.parametrize("n", [99, 500, 997])
def test_lac_equals_mapie(n: int):
    # MAPIE's APS subtracts a random share of the gold option's mass; ours, as the published script's, does not.
    rng = np.random.default_rng(n)
    p = rng.dirichlet(np.full(6, 0.7), size=2 * n)
    gold = np.array([rng.choice(6, p=row) for row in p])
    theirs = SplitConformalClassifier(Given().fit(p, gold), confidence_level=0.9, conformity_score="lac")
    theirs.conformalize(p[:n], gold[:n])
    wanted = theirs.predict_set(p[n:])[1][:, :, 0]
    ours = sets_of(p[n:], conformal_quantile(conformity_scores(p[:n], gold[:n], "lac")), "lac")
    empty = ~wanted.any(axis=1)  # ours hold the most probable option there
    assert 0 < wanted.mean() < 1
    np.testing.assert_array_equal(ours[~empty], wanted[~empty])
    np.testing.assert_array_equal(ours[empty].sum(axis=1), 1)
