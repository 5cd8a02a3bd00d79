"""Answer order and judge scores, by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics import Evidence, compute_all, headline
from mlflow_compress.metrics.judge_scores import turn_scores
from mlflow_compress.metrics.order import content_consistency, drop_pct, position_bias, shuffle_accuracy
from mlflow_compress.records import Judgments, RunRecords


def test_shuffle_metric_by_hand():
    # Original right: 1 1 0 1. Shuffle 1: 1 0 1 1 -> products 1 0 0 1; shuffle 2: 0 1 1 1 -> 0 1 0 1. M = (2 + 2)/8.
    correct, shuffled = [1, 1, 0, 1], [[1, 0], [0, 1], [1, 1], [1, 1]]
    assert shuffle_accuracy(correct, shuffled) == 0.5
    assert drop_pct(0.75, 0.5) == pytest.approx(100 / 3)
    # Being right only when shuffled earns nothing.
    assert shuffle_accuracy([0, 0], [[1, 1], [1, 1]]) == 0.0


def test_drop_needs_an_accuracy_and_shapes_are_checked():
    with pytest.raises(DataError):
        drop_pct(0.0, 0.0)
    for correct, shuffled in (([], [[]]), ([1], [1]), ([1, 0], [[1]])):
        with pytest.raises(DataError):
            shuffle_accuracy(correct, shuffled)


def test_consistency_and_bias_by_hand():
    # Item 0 chooses content 2, then 2 and 1: 1/2. Item 1 chooses 0 every time: 1.
    assert content_consistency([[2, 2, 1], [0, 0, 0]]).tolist() == [0.5, 1.0]
    # Always "A" on balanced gold: |1 - 1/4| + 3 x 1/4 = 1.5, halved.
    assert position_bias([0, 0, 0, 0], [0, 1, 2, 3], 4) == 0.75
    assert position_bias([3, 1], [1, 3], 4) == 0.0
    with pytest.raises(DataError):
        content_consistency([[1]])
    with pytest.raises(DataError):
        position_bias([1], [], 4)


def test_all_orders_of_a_position_blind_and_a_position_bound_model():
    # Over all 24 orders a model that knows the content is right 24 times; one that always says "A" is right on 6
    # orders (those with the gold first), whichever option is gold.
    orders = np.array(list(itertools.permutations(range(4))))
    knows = np.ones((1, 24), dtype=bool)
    says_a = (orders[:, 0] == 2)[None]
    assert shuffle_accuracy([True], knows) == 1.0
    assert shuffle_accuracy([True], says_a) == 0.25


def _judged(scores: dict[tuple[str, int, int], float | None], category: str = "math") -> Judgments:
    return Judgments.from_rows(
        [
            {
                "task": "mt_bench",
                "item_id": item,
                "turn": turn,
                "repeat": repeat,
                "category": category,
                "score": score,
                "judgment": "",
                "judge": "j",
            }
            for (item, turn, repeat), score in scores.items()
        ]
    )


BASE = {("a", 0, 0): 8.0, ("a", 1, 0): 6.0, ("b", 0, 0): 4.0, ("b", 1, 0): 2.0}
# Variant: a's first turn was judged twice (6 and 8), b's second turn has no readable score.
VARIANT = {("a", 0, 0): 6.0, ("a", 0, 1): 8.0, ("a", 1, 0): 5.0, ("b", 0, 0): 3.0, ("b", 1, 0): None}


def test_judge_scores_by_hand():
    run = Evidence(RunRecords(judgments=_judged(BASE)), RunRecords(judgments=_judged(VARIANT)))
    found = headline(compute_all(run))
    assert found["judge/mt_bench_turn1"].value == (7 + 3) / 2
    assert found["judge/mt_bench_turn2"].value == 5.0
    assert found["judge/mt_bench"].value == (5 + 5) / 2
    assert (found["judge/mt_bench"].n, found["judge/mt_bench"].n_unscored) == (3, 1)
    assert found["judge/mt_bench_baseline"].value == (6 + 4) / 2
    # Paired: turn 1 a -1, b -1; turn 2 only a, -1. The unread answer enters neither side.
    assert found["judge/mt_bench_delta"].value == -1.0
    assert found["judge/mt_bench_delta"].n == 3
    by_category = [r for r in compute_all(run) if r.category == "math"]
    assert {r.name for r in by_category} == set(found)


def test_first_turn_alone():
    only = {key: score for key, score in BASE.items() if key[1] == 0}
    found = headline(compute_all(Evidence(RunRecords(judgments=_judged(only)))))
    assert set(found) == {"judge/mt_bench", "judge/mt_bench_turn1"}
    assert found["judge/mt_bench"].value == 6.0


def test_nothing_readable_returns_nothing():
    unread = dict.fromkeys(BASE)
    assert compute_all(Evidence(RunRecords(judgments=_judged(unread)))) == []


def test_broken_judgments_are_refused():
    with pytest.raises(DataError, match="1 to 10"):
        turn_scores(_judged({("a", 0, 0): -1.0}))
    with pytest.raises(DataError, match="turns"):
        turn_scores(_judged({("a", 2, 0): 5.0}))
    with pytest.raises(DataError, match="empty"):
        turn_scores(Judgments.concat([]))
    with pytest.raises(AlignmentError, match="Duplicate"):
        turn_scores(Judgments.concat([_judged(BASE), _judged(BASE)]))
    other = {("c", turn, 0): 5.0 for turn in (0, 1)}
    with pytest.raises(AlignmentError, match="different questions"):
        compute_all(Evidence(RunRecords(judgments=_judged(BASE)), RunRecords(judgments=_judged(other))))
