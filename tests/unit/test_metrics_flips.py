"""Flips, accuracy and margins by hand and as identities."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics import MetricInputs, compute_all, headline
from mlflow_compress.metrics.core.item_table import top_margin
from mlflow_compress.metrics.margins import share_by_bin
from mlflow_compress.metrics.stats.significance import count_flips
from mlflow_compress.records import Items, OptionScores, RunRecords
from mlflow_compress.reporting.details import (
    answers_by_margin,
    flips_by_category,
    flips_table,
    kl_values,
    token_kl_values,
)
from tests import metric_records
from tests.metric_records import QUICK

ANSWERS = st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=40)


def test_transitions_by_hand():
    # gold     A A A B B B
    # baseline A A B B A C   right: y y n y n n
    # variant  A B C B B C   right: y n n y y n
    # Item 2 goes right to wrong, item 5 wrong to right, item 3 from B to C (both wrong); item 6 stays C.
    gold, base, variant = np.array(list("AAABBB")), np.array(list("AABBAC")), np.array(list("ABCBBC"))
    found = count_flips(base == gold, variant == gold, base, variant)
    assert (found.n, found.n_correct, found.c2w, found.w2c, found.w2w) == (6, 3, 1, 1, 1)
    assert found.flips == pytest.approx(2 / 6)
    assert found.all_flips == pytest.approx(3 / 6)
    assert found.accuracy_delta == 0.0
    assert found.mcnemar_p == pytest.approx(3 / 4)  # 1 - P(X = 1)/2 for two coins


@QUICK
@given(ANSWERS)
def test_identities(rows):
    gold, base, variant = (np.array(column) for column in zip(*rows, strict=True))
    f = count_flips(base == gold, variant == gold, base, variant)
    assert f.flips >= abs(f.accuracy_delta)
    assert f.c2w == pytest.approx((f.flips - f.accuracy_delta) * f.n / 2)
    assert (f.c2w + f.w2c) % 2 == abs(f.w2c - f.c2w) % 2
    # Every change of answer is one of the three kinds (a changed answer cannot be right twice).
    assert f.all_flips == pytest.approx((base != variant).mean())
    back = count_flips(variant == gold, base == gold, variant, base)
    assert (back.c2w, back.w2c, back.w2w) == (f.w2c, f.c2w, f.w2w)


def test_flips_without_answers_have_no_all_flips():
    assert count_flips([True], [False]).all_flips is None
    with pytest.raises(DataError):
        count_flips([True], [False], ["A"])
    with pytest.raises(DataError):
        count_flips([], [])
    with pytest.raises(DataError):
        count_flips([True], [False, True])


def test_margin_by_hand():
    # softmax of (ln 6, ln 3, ln 1) is (0.6, 0.3, 0.1): margin 0.3; two equal options: 0; one option: none.
    values = np.array([[np.log(6), np.log(3), 0.0], [1.0, 1.0, -np.inf], [1.0, -np.inf, -np.inf]])
    np.testing.assert_allclose(top_margin(values), [0.3, 0.0, np.nan], atol=1e-12)


def test_share_by_bin_by_hand():
    # Bins [0, 0.5), [0.5, 1]: margins 0.1 (changed), 0.4 (not), 0.5 (changed), 1.0 (changed).
    found = share_by_bin([0.1, 0.4, 0.5, 1.0], [1, 0, 1, 1], edges=[0, 0.5, 1])
    assert found.n.tolist() == [2, 2]
    assert found.share.tolist() == [0.5, 1.0]
    assert (found.low <= found.share).all() and (found.share <= found.high).all()
    assert share_by_bin([0.95], [True]).left.tolist() == [pytest.approx(0.9)]
    with pytest.raises(ConfigError):
        share_by_bin([0.5], [True], edges=[0, 0.2])
    with pytest.raises(ConfigError):
        share_by_bin([0.5], [True], edges=[0.8, 0.2])


def _two_option_runs() -> tuple[RunRecords, RunRecords]:
    """Four two-option items; ties and an unscored item on purpose."""
    items = Items.from_rows(
        [
            {
                "task": "t",
                "item_id": str(i),
                "family": "lettered",
                "rule": "loglik",
                "category": "c",
                "question": f"q{i}",
                "prompt": f"p{i}",
                "options": ["yes", "no"],
                "gold": 0,
                "answers": [],
            }
            for i in range(4)
        ]
    )

    def run(values: list[tuple[float, float] | None]) -> RunRecords:
        rows = [
            {
                "task": "t",
                "item_id": str(i),
                "permutation": 0,
                "option": option,
                "content": option,
                "loglik": pair[option],
                "n_tokens": 1,
                "n_chars": 3,
                "n_bytes": 3,
                "greedy": False,
            }
            for i, pair in enumerate(values)
            if pair is not None
            for option in (0, 1)
        ]
        return RunRecords(items=items, option_scores=OptionScores.from_rows(rows))

    # Baseline: right, right by a tie (the lowest option wins), wrong, right. Variant: wrong, right, wrong, unscored.
    base = run([(-1.0, -2.0), (-1.0, -1.0), (-2.0, -1.0), (-1.0, -3.0)])
    return base, run([(-2.0, -1.0), (-1.0, -1.5), (-2.0, -1.9), None])


def test_records_by_hand_ties_and_unscored():
    found = headline(compute_all(MetricInputs(*_two_option_runs())))
    # Of the three items that both have answered: baseline 2, variant 1. The fourth is counted apart.
    assert found["quality/accuracy_baseline"].value == pytest.approx(2 / 3)
    assert found["quality/accuracy"].value == pytest.approx(1 / 3)
    assert (found["quality/accuracy"].n, found["quality/accuracy"].n_unscored) == (3, 1)
    # Pairs: items 0 to 2; only item 0 flips.
    assert found["quality/accuracy_delta"].value == pytest.approx(-1 / 3)
    assert found["distance/flips_pct"].value == pytest.approx(100 / 3)
    assert found["distance/c2w_pct"].n_unscored == 1
    assert found["distance/changed_correct_pct"].value == 50.0
    assert found["distance/changed_incorrect_pct"].value == 0.0
    # Margins of the baseline's right items among the three: tanh(1/2) and 0 (the tie); p(best) - p(other) = tanh(gap / 2).
    expected = (np.tanh(0.5) + 0.0) / 2
    assert found["quality/margin_correct_baseline"].value == pytest.approx(expected)


def test_flips_table_by_hand():
    (row,) = flips_table(MetricInputs(*_two_option_runs()))
    assert row == {
        "task": "t",
        "item_id": "0",
        "category": "c",
        "question": "q0",
        "options": ["yes", "no"],
        "gold": "yes",
        "baseline": "yes",
        "variant": "no",
        "kind": "c2w",
        "margin_baseline": pytest.approx(np.tanh(0.5)),
        "kl": None,
    }


def test_tables_agree_with_the_metrics():
    full = metric_records.inputs(60)
    results = compute_all(full)
    table = flips_table(full)
    counts = {r.task: r.value * r.n / 100 for r in results if r.name == "distance/all_flips_pct" and r.category is None}
    for task in ("mmlu", "piqa"):
        assert sum(row["task"] == task for row in table) == round(counts[task])
    assert not any(row["task"] == "mmlu_six" for row in table)
    margins = [row["margin_baseline"] for row in table if row["margin_baseline"] is not None]
    assert margins == sorted(margins, reverse=True)
    generated = [row for row in table if row["task"] == "trivia"]
    assert generated and all(row["gold"] is None and row["kind"] in ("c2w", "w2c") for row in generated)
    changed, wrong = answers_by_margin(full)
    assert changed is not None and wrong is not None
    assert changed.n.sum() == wrong.n.sum() == 120
    assert (changed.n * changed.share).sum() == pytest.approx(counts[None])
    assert len(kl_values(full)) == 120 and len(token_kl_values(full)) == 600
    categories = flips_by_category(full)
    assert {part for part in categories if part[1]} == {("mmlu", c) for c in metric_records.CATEGORIES}
    assert sum(f.n for (task, _), f in categories.items() if task == "mmlu") == 60
    trivia = categories["trivia", None]  # generated answers have no options, and so no other wrong one
    assert trivia.w2w is None and trivia.c2w + trivia.w2c == sum(row["task"] == "trivia" for row in table)
    assert len(token_kl_values(MetricInputs(full.baseline))) == 0
    assert answers_by_margin(MetricInputs(*(RunRecords(**_words(r)) for r in (full.baseline, full.variant)))) is None


def _words(run: RunRecords) -> dict[str, object]:
    return {"items": run.items.where(family="exact"), "generations": run.generations}
