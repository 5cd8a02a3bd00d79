"""Comparing from predictions alone: plain rows, harness logs, records."""

import json
import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from mlflow_compress.commands.compare.run import Comparison
from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics import compute_all, headline
from mlflow_compress.metrics.core.answer_files import (
    answers_from_harness,
    answers_from_rows,
    compare_answers,
    compare_records,
)
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.requirements import PREDICTIONS
from mlflow_compress.records import RunRecords
from tests import metric_records
from tests.shared_data import PUBLISHED

KEYS = {
    "n",
    "accuracy_baseline",
    "accuracy_variant",
    "accuracy_delta",
    "c2w",
    "w2c",
    "w2w",
    "flips_pct",
    "all_flips_pct",
    "mcnemar_p",
}


def _rows(preds, gold="AABBC"):
    return answers_from_rows({"id": i, "pred": p, "gold": g} for i, (p, g) in enumerate(zip(preds, gold, strict=True)))


def test_plain_rows_by_hand():
    # gold A A B B C; baseline A B B C C: right 1 0 1 0 1; variant B C B B A: right 0 0 1 1 0.
    # c2w: items 0 and 4; w2c: item 3; w2w: item 1 (B to C). Mid-p of 2 against 1: (2 (1 + 3) - 3)/8.
    found = compare_answers(_rows("ABBCC"), _rows("BCBBA"))
    assert set(found) >= KEYS
    assert (found["n"], found["c2w"], found["w2c"], found["w2w"]) == (5, 2, 1, 1)
    assert (found["accuracy_baseline"], found["accuracy_variant"]) == (0.6, 0.4)
    assert found["accuracy_delta"] == pytest.approx(-0.2)
    assert (found["flips_pct"], found["all_flips_pct"]) == (60.0, 80.0)
    assert found["mcnemar_p"] == pytest.approx(5 / 8)
    assert found["flips_pct_interval"][0] < 60.0 < found["flips_pct_interval"][1]
    json.dumps(found)


def test_order_does_not_matter_and_unanswered_is_counted_apart():
    base, variant = _rows("ABBCC"), _rows(["B", "C", "B", "B", None])
    found = compare_answers(base, variant[::-1])
    assert (found["n"], found["n_unscored"], found["c2w"]) == (4, 1, 1)
    with pytest.raises(DataError, match="No item"):
        compare_answers(base, _rows([None] * 5))


def test_answers_of_any_type_compare_by_their_text():
    # One program writes 1, another one "1", a third one 1.0: one answer.
    found = compare_answers(
        _rows([1, "1", 1.0, True], gold=[1, 1, "1", "true"]), _rows(["1", "one", 1, True], gold=[1, 1, 1, "true"])
    )
    assert (found["n"], found["c2w"], found["w2c"], found["w2w"]) == (4, 1, 0, 0)
    found = compare_answers(_rows([2, [1, 2]], gold=[1, 1]), _rows([2.0, [1, 2]], gold=[1, 1]))
    assert (found["c2w"], found["w2w"]) == (0, 0)
    for broken in ({"a": 1}, float("inf")):
        with pytest.raises(DataError, match="Row 1 has a pred that is no answer"):
            _rows([broken], gold=["x"])


def _grouped(flips, size, groups):
    """`groups` passages with `size` questions each; all answers about the first `flips` passages become wrong."""
    rows = [{"id": f"{g}-{i}", "pred": "A", "gold": "A", "group": f"p{g}"} for g in range(groups) for i in range(size)]
    return rows, [{**row, "pred": "B" if int(row["group"][1:]) < flips else "A"} for row in rows]


def test_items_with_a_group_in_common_count_as_what_they_are():
    # Ten answers of a passage flip together or not at all: the design effect is 10 * 40/39, so that 400 items tell what
    # 39 do, with 1.2 (4*81 + 36)^2 / (4*6561 + 36) = 5.918 degrees of freedom.
    base, variant = _grouped(4, 10, 40)
    found = compare_answers(answers_from_rows(base), answers_from_rows(variant))
    single = [[{**row, "group": None} for row in rows if row["id"].endswith("-0")] for rows in (base, variant)]
    alone = compare_answers(*map(answers_from_rows, single))
    assert (found["n"], found["n_groups"], alone["n"], alone["n_groups"]) == (400, 40, 40, 40)
    z = float(stats.t.ppf(0.975, 5.9178))
    half = z * math.sqrt(0.1 * 0.9 / 39 + (z / 78) ** 2) / (1 + z * z / 39)
    middle = (0.1 + z * z / 78) / (1 + z * z / 39)
    exact = float(stats.beta.ppf(stats.norm.sf(z), 3.9, 39 - 3.9 + 1))  # 3.9 of 39: the end of the nearer bound
    assert found["flips_pct_interval"] == pytest.approx((100 * exact, 100 * (middle + half)), rel=1e-4)
    assert found["flips_pct"] == alone["flips_pct"] == 10.0
    # 4 of 4 passages became wrong: mid-p 1/16 of passages, as of items alone; of 40 items alone it were 1e-12.
    assert alone["mcnemar_p"] == pytest.approx(1 / 16) and found["mcnemar_p"] == pytest.approx(1 / 16)
    text = Comparison(found).as_text()
    assert "items      400 in 40 groups" in text and "[" in text
    few = compare_answers(*map(answers_from_rows, _grouped(2, 10, 8)))
    assert few["flips_pct_interval"] is few["accuracy_delta_interval"] is None
    assert "none: too few groups, as they count as fewer than 20 of one size" in Comparison(few).as_text()
    json.dumps(few)


def test_groups_that_differ_are_refused_and_harness_passages_are_groups():
    base, variant = _grouped(1, 2, 3)
    variant[0]["group"] = "other"
    with pytest.raises(AlignmentError, match="differ in the group of 1 item"):
        compare_answers(answers_from_rows(base), answers_from_rows(variant))
    with pytest.raises(DataError, match="Row 1 has a group that is no text"):
        answers_from_rows([{**base[0], "group": 3}])
    docs = [{"passage": "It rains.", "q": i} for i in range(2)] + [{"passage": "It snows."}, {"query": "Why?"}]
    logged = [_sample(i, (-1.0, -2.0), 0, acc=1.0, doc=doc, task_name="boolq") for i, doc in enumerate(docs)]
    assert [answer.group for answer in answers_from_harness(logged)] == [
        *["boolq/It rains."] * 2,
        "boolq/It snows.",
        None,
    ]


def test_other_items_golds_and_prompts_are_refused():
    base = _rows("ABBCC")
    with pytest.raises(AlignmentError, match=r"1 only in the baseline \['4'\]"):
        compare_answers(base, base[:4])
    with pytest.raises(AlignmentError, match=r"differ in the gold of 1 item.*'0'"):
        compare_answers(base, _rows("ABBCC", gold="BABBC"))
    with pytest.raises(AlignmentError, match="an id twice"):
        compare_answers([*base, base[0]], base)
    with pytest.raises(DataError, match="holds no answers"):
        compare_answers(base, [])
    one = answers_from_rows([{"id": 1, "pred": "A", "gold": "A", "prompt": "0-shot"}])
    other = answers_from_rows([{"id": 1, "pred": "A", "gold": "A", "prompt": "5-shot"}])
    with pytest.raises(AlignmentError, match="differ in the prompt"):
        compare_answers(one, other)
    with pytest.raises(DataError, match="Row 1 lacks pred, gold"):
        answers_from_rows([{"id": 1}])
    with pytest.raises(DataError, match="Row 1 has a NaN as its pred"):
        answers_from_rows([{"id": 1, "pred": float("nan"), "gold": "A"}])
    with pytest.raises(DataError, match="Row 1 has no gold"):
        answers_from_rows([{"id": 1, "pred": "A", "gold": None}])


def _sample(doc_id, values, target, **more):
    """A multiple-choice line of samples_*.jsonl as lm-evaluation-harness 0.4.13 writes it."""
    choices = ("one", "a long one")
    return {
        "doc_id": doc_id,
        "doc": {},
        "target": str(target),
        "arguments": {f"gen_args_{i}": {"arg_0": "Q", "arg_1": f" {c}"} for i, c in enumerate(choices)},
        "resps": [[[str(v), "False"]] for v in values],
        "filtered_resps": [[str(v), "False"] for v in values],
        "filter": "none",
        "doc_hash": f"d{doc_id}",
        "prompt_hash": "abc",
        "target_hash": "t",
        **more,
    }


def test_harness_samples_by_hand():
    # Sums -3 and -5: choice 0. A character: -3/3 = -1 and -5/10 = -0.5: choice 1. The second row's sums are a tie,
    # which the first choice wins; divided, -2/3 and -2/10, choice 1 wins.
    plain = answers_from_harness([_sample(0, (-3.0, -5.0), 1, acc=0.0), _sample(1, (-2.0, -2.0), 0, acc=1.0)])
    assert [(a.pred, a.is_correct, a.rule) for a in plain] == [(0, False, "acc"), (0, True, "acc")]
    both = [_sample(0, (-3.0, -5.0), 1, acc=0.0, acc_norm=1.0), _sample(1, (-2.0, -2.0), 0, acc=1.0, acc_norm=0.0)]
    normalised = answers_from_harness(both)
    assert [(a.pred, a.is_correct, a.rule) for a in normalised] == [(1, True, "acc_norm"), (1, False, "acc_norm")]
    with pytest.raises(AlignmentError, match="differ in the scoring rule"):
        compare_answers(plain, normalised)
    other = answers_from_harness([_sample(0, (-3.0, -1.0), 1, acc=1.0), _sample(1, (-2.0, -1.0), 0, acc=0.0)])
    found = compare_answers(plain, other)
    assert (found["c2w"], found["w2c"], found["w2w"], found["rule"]) == (1, 1, 0, "acc")


def test_harness_targets_that_are_texts():
    # Winogrande scores one text after several contexts: the target is that text, and the logged acc decides.
    rows = [_sample(0, (-3.0, -5.0), "was late.", acc=0.0), _sample(1, (-3.0, -2.0), "left.", acc=0.0)]
    moved = [_sample(0, (-5.0, -3.0), "was late.", acc=1.0), _sample(1, (-1.0, -2.0), "left.", acc=0.0)]
    found = compare_answers(answers_from_harness(rows), answers_from_harness(moved))
    assert (found["w2c"], found["w2w"]) == (1, 1)


def test_harness_generations_take_the_logged_score():
    base = {"doc_id": 3, "target": "42", "filtered_resps": ["42"], "exact_match": 1.0, "task_name": "gsm8k"}
    variant = {**base, "filtered_resps": ["forty"], "exact_match": 0.0}
    found = compare_answers(answers_from_harness([base]), answers_from_harness([variant]))
    assert (found["c2w"], found["w2w"], found["all_flips_pct"]) == (1, None, None)
    assert answers_from_harness([base])[0].id == "gsm8k/3"
    # Two filters write every document twice; the first in the file counts, and is named.
    strict, flexible = ({**base, "filter": name} for name in ("strict-match", "flexible-extract"))
    found = compare_answers(*[answers_from_harness([strict, {**flexible, "exact_match": 0.0}])] * 2)
    assert (found["n"], found["accuracy_baseline"], found["rule"]) == (1, 1.0, "exact_match,strict-match")
    # A single continuation (LAMBADA) is right or wrong as logged.
    word = {"doc_id": 0, "target": " chair", "filtered_resps": [["-3.25", "False"]], "acc": 0, "perplexity": -3.25}
    assert not answers_from_harness([word])[0].is_correct


def test_harness_mutual_information_stands_behind_the_choices():
    row = _sample(0, (-3.0, -1.0, -0.1, -9.0), 1, acc=1.0, acc_mutual_info=1.0)
    assert answers_from_harness([row])[0].pred == 1


def test_broken_harness_samples_are_refused():
    with pytest.raises(DataError, match="Row 1 is no harness sample: it lacks target, filtered_resps"):
        answers_from_harness([{"doc_id": 1}])
    with pytest.raises(DataError, match="NaN"):
        answers_from_harness([_sample(0, (float("nan"), -1.0), 0, acc=0.0)])
    for row in ({"doc_id": 1, "target": "x", "filtered_resps": ["x"]}, _sample(0, (-1.0, -2.0), 0)):
        with pytest.raises(DataError, match=r"has no (exact_match|acc_norm) or acc"):
            answers_from_harness([row])
    with pytest.raises(DataError, match="lacks the choices"):
        answers_from_harness([{**_sample(0, (-1.0, -2.0), 0, acc_norm=1.0), "arguments": {}}])
    with pytest.raises(DataError, match="logged acc of a harness sample does not follow"):
        answers_from_harness([_sample(7, (-1.0, -2.0), 0, acc=0.0)])
    one, other = ([_sample(0, (-1.0, -2.0), 0, acc=1.0, **hashes)] for hashes in ({}, {"doc_hash": "other"}))
    with pytest.raises(AlignmentError, match="differ in the question"):
        compare_answers(answers_from_harness(one), answers_from_harness(other))
    with pytest.raises(AlignmentError, match="differ in the prompt"):
        shots = [_sample(0, (-1.0, -2.0), 0, acc=1.0, prompt_hash="5-shot")]
        compare_answers(answers_from_harness(one), answers_from_harness(shots))


def test_records_agree_with_the_metrics():
    full = metric_records.inputs(30)
    found, results = compare_records(full.baseline, full.variant), headline(compute_all(full))
    assert found["n"] == 60
    assert found["flips_pct"] == results["distance/flips_pct"].value
    assert found["all_flips_pct"] == results["distance/all_flips_pct"].value
    assert found["accuracy_delta"] == results["quality/accuracy_delta"].value
    assert found["accuracy_delta_interval"] == [
        results["quality/accuracy_delta"].low,
        results["quality/accuracy_delta"].high,
    ]
    assert set(found["tasks"]) == {"mmlu", "piqa", "lambada", "trivia"}
    assert found["tasks"]["lambada"]["w2w"] is None
    p = [task["mcnemar_p"] for task in found["tasks"].values()]
    adjusted = [task["mcnemar_p_holm"] for task in found["tasks"].values()]
    np.testing.assert_allclose(adjusted, multipletests(p, method="holm")[1])
    json.dumps(found)


def test_records_without_choices_pool_what_there_is():
    full = metric_records.inputs(6)
    words = [
        RunRecords(items=r.items.where(family="exact"), generations=r.generations)
        for r in (full.baseline, full.variant)
    ]
    found = compare_records(*words)
    assert found["n"] == 20 and found["all_flips_pct"] is None
    with pytest.raises(DataError, match="cannot be compared"):
        compare_records(RunRecords(), RunRecords())
    nobody = RunRecords(items=words[0].items, generations=full.baseline.generations.where(task="instructions"))
    with pytest.raises(DataError, match="No item"):
        compare_records(nobody, nobody)
    assert MetricInputs(nobody).missing(PREDICTIONS) is None


def test_published_predictions():
    published = json.loads((PUBLISHED / "flips.json").read_text())["mmlu"]

    def answers(precision):
        both = zip(published[f"gemma-2-2b-it {precision}"], published["gold"], strict=True)
        return answers_from_rows({"id": i, "pred": pred, "gold": gold} for i, (pred, gold) in enumerate(both))

    found = compare_answers(answers("fp16"), answers("int4"))
    assert (found["n"], found["c2w"], found["w2c"], found["w2w"]) == (975, 46, 46, 42)
    assert round(found["flips_pct"], 2) == 9.44 and round(found["all_flips_pct"], 2) == 13.74
    assert found["mcnemar_p"] == pytest.approx(1 - math.comb(92, 46) / 2**93)
