"""KL against harm: what the benchmark computes of measured items, by hand, and what it has stored."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from benchmarks.kl_against_harm import (
    AFTER,
    BEFORE,
    ITEMS,
    NEAR,
    STORED,
    Measured,
    as_measured,
    claims,
    closer_with_more_harm,
    exchanged,
    own_shapes,
    rank_correlation,
    read,
    write,
    write_task,
)
from mlflow_compress.decide.separation import Difference
from mlflow_compress.metrics.stats.correlation import spearman


def measured(variants: int = 4, items: int = 200) -> Measured:
    """Return variants that change a tenth of the answers."""
    rng = np.random.default_rng(3)
    baseline = rng.random(items) < 0.6
    names = tuple(map(str, range(variants)))
    correct = baseline ^ (rng.random((variants, items)) < 0.1)
    return Measured(names, baseline, correct, rng.exponential(size=(variants, items)))


def difference(value: float, p_holm: float) -> Difference:
    return Difference(value=value, low=value, high=value, n=9, p=p_holm, p_holm=p_holm)


def test_harm_is_what_gets_worse_minus_what_gets_better() -> None:
    """Of four items, the baseline has three right. One variant loses two and gains one, the other changes nothing."""
    baseline = np.array([True, True, True, False])
    one = Measured(("a", "b"), baseline, np.array([[False, False, True, True], baseline]), np.zeros((2, 4)))
    assert one.harm.tolist() == [0.25, 0.0] and one.flips.tolist() == [0.75, 0.0]
    _, items = one.scored()[0]
    assert items is not None and items.flipped.tolist() == [1, 1, 0, 1] and items.correct.tolist() == [0, 0, 1, 1]


def test_ranks_are_those_within_a_model() -> None:
    x, y = np.array([1.0, 5.0, 2.0, 2.0, 9.0]), np.array([3.0, 1.0, 4.0, 1.0, 5.0])
    alone = spearman(x, y)
    assert alone is not None and rank_correlation([(x, y)]) == pytest.approx(alone.value)
    rising = (np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0]))
    assert rank_correlation([rising, (rising[0] + 100, rising[1] - 100)]) == pytest.approx(1.0)


def test_a_claim_is_wrong_where_the_truth_is_the_other_way_or_equal() -> None:
    """Of three pairs, two are told apart: the first rightly, the last the wrong way round; the second is not."""
    tests = [difference(1.0, 0.01), difference(-1.0, 0.5), difference(-1.0, 0.01)]
    assert claims(tests, np.array([0.0, 1.0, 2.0])) == (True, 1, 3)
    assert claims(tests, np.array([0.0, 2.0, 1.0])) == (False, 2, 3)
    assert claims(tests, np.zeros(3)) == (True, 0, 0)
    assert claims([difference(1.0, 0.06)] * 3, np.zeros(3)) == (False, 0, 0)


def test_of_pairs_told_apart_the_closer_one_may_have_more_harm() -> None:
    """KL 1, 2 and 3 on every item but for a little: all pairs are told apart. Harm is 1, 0 and 0 of 40."""
    kl = np.arange(1.0, 4.0)[:, None] + 0.01 * np.random.default_rng(0).random((3, 40))
    correct = np.ones((3, 40), dtype=bool)
    correct[0, 0] = False
    assert closer_with_more_harm(Measured(("a", "b", "c"), np.ones(40, dtype=bool), correct, kl)) == (2, 2)


def test_simulated_variants_are_equal_where_they_should_be() -> None:
    """Exchanged values stay with their item; the mean of many samples is the one that all variants have."""
    one, rng = measured(), np.random.default_rng(0)
    found, *truths = exchanged(one, rng)
    assert not np.any(truths)
    sums = {(right, round(kl, 9)) for right, kl in zip(one.correct.sum(axis=0), one.kl.sum(axis=0), strict=True)}
    drawn = zip(found.correct.sum(axis=0), found.kl.sum(axis=0), strict=True)
    assert {(right, round(kl, 9)) for right, kl in drawn} <= sums
    samples = [own_shapes(one, rng)[0] for _ in range(400)]
    # Standard errors: 1 nat/sqrt(200 * 400) = 0.004, and sqrt(0.1/(200 * 400)) = 0.001 of harm
    assert np.mean([s.kl.mean(axis=1) for s in samples], axis=0) == pytest.approx(np.ones(4), abs=0.016)
    assert np.mean([s.harm for s in samples], axis=0) == pytest.approx(np.zeros(4), abs=0.005)
    assert np.mean([s.flips for s in samples], axis=0) == pytest.approx(one.flips, abs=0.005)
    _, kl, right = as_measured(one, rng)
    assert kl.tolist() == one.kl.mean(axis=1).tolist() and right == pytest.approx(one.baseline.mean() - one.harm)


def test_the_right_end_is_that_of_the_passage(tmp_path: Path) -> None:
    text = " ".join(str(number) for number in range(100_000))
    write_task(text, tmp_path / "task.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "task.jsonl").read_text().splitlines()]
    assert len(rows) == ITEMS and len({row["answer"] for row in rows}) == 4
    for row in rows:
        assert len(row["context"]) == BEFORE and len(set(row["choices"])) == 4
        assert {len(choice) for choice in row["choices"]} == {AFTER}
        goes_on = [f"{row['context']} {choice}" in text for choice in row["choices"]]
        assert goes_on == [index == row["answer"] for index in range(4)]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    one = measured(items=203)
    write(tmp_path / "some.npz", {"a": one, "b": one.part([1, 2])})
    again = read(tmp_path / "some.npz")
    assert list(again) == ["a", "b"] and again["b"].names == ("1", "2")
    assert (again["a"].correct == one.correct).all() and (again["a"].baseline == one.baseline).all()
    # Its root is kept in float16: half a unit in the last of 11 places, twice for the square.
    assert again["a"].kl == pytest.approx(one.kl, rel=(1 + 2.0**-11) ** 2 - 1, abs=2.0**-38)


def test_three_models_have_thirty_variants_near_their_baseline() -> None:
    stored = read(STORED)
    assert len(stored) == 3 and sum(len(one.below(NEAR).names) for one in stored.values()) >= 30
    for one in stored.values():
        assert len({*one.names}) == len(one.names)
        assert not any((a == b).all() for a, b in combinations(one.kl, 2))
