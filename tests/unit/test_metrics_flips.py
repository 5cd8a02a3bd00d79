"""Flips, accuracy and margins by hand and as identities.

Answer order and judge scores, by hand.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_compress.errors import AlignmentError, ConfigError, DataError
from mlflow_compress.metrics import MetricInputs, compute_all, headline, unmet
from mlflow_compress.metrics.core.item_table import OptionGrid, gold_lead, top_margin
from mlflow_compress.metrics.judge_scores import turn_scores
from mlflow_compress.metrics.margins import certain, share_by_bin
from mlflow_compress.metrics.order import bias_of, content_consistency, drop_pct, letter_excess
from mlflow_compress.metrics.stats.significance import count_flips, mcnemar_mid_p
from mlflow_compress.records import Items, Judgments, OptionDistances, OptionScores, RunRecords
from mlflow_compress.reporting import details
from tests import metric_records
from tests.metric_records import QUICK, item_of, score_of
from tests.roundoff import of_sum

ANSWERS = st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=40)


def test_transitions_by_hand():
    # gold     A A A B B B
    # baseline A A B B A C   right: y y n y n n
    # variant  A B C B B C   right: y n n y y n
    # Item 2 goes right to wrong, item 5 wrong to right, item 3 from B to C (both wrong); item 6 stays C.
    gold, base, variant = np.array(list("AAABBB")), np.array(list("AABBAC")), np.array(list("ABCBBC"))
    found = count_flips(base == gold, variant == gold, base, variant)
    assert (found.n, found.n_correct, found.c2w, found.w2c, found.w2w) == (6, 3, 1, 1, 1)
    assert mcnemar_mid_p(found.c2w, found.w2c) == pytest.approx(3 / 4)  # 1 - P(X = 1)/2 for two coins


@QUICK
@given(ANSWERS)
def test_identities(rows):
    gold, base, variant = (np.array(column) for column in zip(*rows, strict=True))
    f = count_flips(base == gold, variant == gold, base, variant)
    assert f.w2c - f.c2w == (variant == gold).sum() - (base == gold).sum()
    # Every change of answer is one of the three kinds (a changed answer cannot be right twice).
    assert f.c2w + f.w2c + f.w2w == (base != variant).sum()
    back = count_flips(variant == gold, base == gold, variant, base)
    assert (back.c2w, back.w2c, back.w2w) == (f.w2c, f.c2w, f.w2w)


def test_flips_without_answers_and_margins_by_hand():
    assert count_flips([True], [False]).w2w is None
    with pytest.raises(DataError):
        count_flips([True], [False], ["A"])
    with pytest.raises(DataError):
        count_flips([], [])
    with pytest.raises(DataError):
        count_flips([True], [False, True])
    # softmax of (ln 6, ln 3, ln 1) is (0.6, 0.3, 0.1): margin 0.3; two equal options: 0; one option: none.
    values = np.array([[np.log(6), np.log(3), 0.0], [1.0, 1.0, -np.inf], [1.0, -np.inf, -np.inf]])
    np.testing.assert_allclose(top_margin(values), [0.3, 0.0, np.nan], atol=of_sum(8))


def test_lead_by_hand():
    # Right: 1 nat ahead; wrong: 2 behind; by character: (0.5 - 0.3) times the mean of 4 and 10; no other option: none.
    # Those of two tokens over the root of 3 and both options' nats (2 + 3, 4 + 2, 2 + 3), letters over that of 5.5.
    loglik = np.array([[[-2.0, -3.0, -9.0]], [[-2.0, -4.0, -3.0]], [[-2.0, -3.0, -np.inf]], [[-1.0, -np.inf, -np.inf]]])
    loglik = np.concatenate([loglik, loglik[1:2]])
    by_rule = loglik.copy()
    by_rule[2, 0, :2] = -0.5, -0.3
    content = np.array([[[0, 1, 2]], [[0, 1, 2]], [[1, 0, 0]], [[0, 0, 0]], [[0, 1, 2]]])
    n_tokens = np.full(loglik.shape, 2)
    n_tokens[4] = 1
    scored = np.isfinite(loglik).all(axis=-1)
    grid = OptionGrid(
        loglik=loglik, by_rule=by_rule, content=content, n_tokens=n_tokens, greedy=scored[..., None], scored=scored
    )
    lead = gold_lead(grid, np.array([0, 1, 1, 0, 1]))[:, 0]
    np.testing.assert_allclose(lead**2, [1 / 8, 4 / 9, 1.96 / 8, np.nan, 4 / 5.5], atol=of_sum(8))


def test_certain_answers_by_hand():
    # p = (0.6, 0.4) allows a KL below 0.6 ln 1.2 + 0.4 ln 0.8 = 0.0201 nats.
    full = metric_records.inputs(40)
    rows = full.baseline.option_scores.table.to_pylist()
    for row in rows:
        row["loglik"] = math.log({0: 0.6, 1: 0.4}.get(row["option"], 1e-9))
    near = full.variant.option_distances.table.to_pylist()
    ids = sorted({row["item_id"] for row in near if row["task"] == "mmlu"})
    for row in near:
        row["kl"] = 0.0200 if row["item_id"] in ids[:10] else 0.0202
    baseline = replace(full.baseline, option_scores=OptionScores.from_rows(rows))
    variant = replace(full.variant, option_distances=OptionDistances.from_rows(near))
    found = {r.task: r for r in certain.compute(replace(full, baseline=baseline, variant=variant))}
    assert found["mmlu"].n == len(ids) and found["mmlu"].value == pytest.approx(100 * 10 / len(ids))


def test_share_by_bin_by_hand():
    # Bins [0, 0.5), [0.5, 1]: margins 0.1 (changed), 0.4 (not), 0.5 (changed), 1.0 (changed).
    found = share_by_bin([0.1, 0.4, 0.5, 1.0], [1, 0, 1, 1], edges=[0, 0.5, 1])
    assert found.n.tolist() == [2, 2]
    assert found.mean.tolist() == [0.5, 1.0]
    assert (found.low <= found.mean).all() and (found.mean <= found.high).all()
    assert share_by_bin([0.95], [True]).left.tolist() == [pytest.approx(0.9)]
    with pytest.raises(ConfigError):
        share_by_bin([0.5], [True], edges=[0, 0.2])
    with pytest.raises(ConfigError):
        share_by_bin([0.5], [True], edges=[0.8, 0.2])


def _two_option_runs() -> tuple[RunRecords, RunRecords]:
    """Four two-option items; ties and an unscored item on purpose."""
    items = Items.from_rows(
        [item_of(i, category="c", question=f"q{i}", options=["yes", "no"], answers=[]) for i in range(4)]
    )

    def run(values: list[tuple[float, float] | None]) -> RunRecords:
        rows = [
            score_of(i, option, pair[option]) for i, pair in enumerate(values) if pair is not None for option in (0, 1)
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
    (row,) = details.flips_table(MetricInputs(*_two_option_runs()))
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
    table = details.flips_table(full)
    counts = {r.task: r.value * r.n / 100 for r in results if r.name == "distance/all_flips_pct" and r.category is None}
    for task in ("mmlu", "piqa"):
        assert sum(row["task"] == task for row in table) == round(counts[task])
    assert not any(row["task"] == "mmlu_six" for row in table)
    margins = [row["margin_baseline"] for row in table if row["margin_baseline"] is not None]
    assert margins == sorted(margins, reverse=True)
    generated = [row for row in table if row["task"] == "trivia"]
    assert generated and all(row["gold"] is None and row["kind"] in ("c2w", "w2c") for row in generated)
    changed, wrong = details.answers_by_margin(full)
    assert changed.n.sum() == wrong.n.sum() == 120
    assert (changed.n * changed.mean).sum() == pytest.approx(counts[None])
    assert len(details.kl_values(full)) == 120 and len(details.token_kl_values(full)) == 600
    categories = details.flips_by_category(full)
    assert {part for part in categories if part[1]} == {("mmlu", c) for c in metric_records.CATEGORIES}
    assert sum(f.n for (task, _), f in categories.items() if task == "mmlu") == 60
    trivia = categories["trivia", None]  # generated answers have no options, and so no other wrong one
    assert trivia.w2w is None and trivia.c2w + trivia.w2c == sum(row["task"] == "trivia" for row in table)
    assert len(details.token_kl_values(MetricInputs(full.baseline))) == 0
    assert (
        details.answers_by_margin(MetricInputs(*(RunRecords(**_words(r)) for r in (full.baseline, full.variant))))
        is None
    )


def _words(run: RunRecords) -> dict[str, object]:
    return {"items": run.items.where(family="exact"), "generations": run.generations}


def test_drop_needs_an_accuracy():
    assert drop_pct(0.75, 0.5) == pytest.approx(100 / 3)
    assert not np.isfinite(drop_pct([0.0, 0.0], [0.0, 0.5])).any()  # no drop exists


def _bias(letter, gold, n_letters):
    return bias_of(letter_excess(letter, gold, n_letters, np.ones_like(letter, dtype=bool)).mean(axis=0))


def test_consistency_and_bias_by_hand():
    # Item 0 chooses content 2, then 2 and 1: 1/2. Item 1 chooses 0 every time: 1.
    assert content_consistency([[2, 2, 1], [0, 0, 0]]).tolist() == [0.5, 1.0]
    # Always "A" on balanced gold: |1 - 1/4| + 3 x 1/4 = 1.5, halved.
    assert _bias([[0], [0], [0], [0]], [[0], [1], [2], [3]], 4) == 0.75
    assert _bias([[3], [1]], [[1], [3]], 4) == 0.0
    # Chosen (3, 2, 1)/6, right (2, 2, 2)/6: (1 + 0 + 1)/6 halved.
    assert _bias([[0, 1, 2], [0, 0, 1]], [[0, 1, 2], [0, 1, 2]], 3) == pytest.approx(1 / 6)
    with pytest.raises(DataError):
        content_consistency([[1]])


def test_the_shuffle_metric_by_hand():
    # Original right: 1 1 0 1. Shuffle 1: 1 0 1 1 -> products 1 0 0 1; shuffle 2: 0 1 1 1 -> 0 1 0 1. M = (2 + 2)/8;
    # being right only when shuffled earns nothing. Accuracy 3/4, so the drop is (3/4 - 1/2)/(3/4).
    right = [[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1]]
    orders = [(0, 1), (1, 0), (1, 0)]
    items, rows = [], []
    for i, row in enumerate(right):
        items.append(item_of(i))
        for permutation, order in enumerate(orders):
            for option, content in enumerate(order):
                best = (content == 0) == bool(row[permutation])
                rows.append(score_of(i, option, -1.0 - (not best), permutation=permutation, content=content))
    run = RunRecords(items=Items.from_rows(items), option_scores=OptionScores.from_rows(rows))
    found = headline(compute_all(MetricInputs(run)))
    assert found["robustness/shuffle_accuracy"].value == 0.5
    assert found["robustness/shuffle_drop_pct"].value == pytest.approx(100 / 3)


def _orders_run(choose, n_options=(4, 4, 3), *, task="t_orders", family="lettered_orders", left_out=(), group=str):
    """Records of a model that gives the shown position `choose(order, gold)` the highest score; gold is item % k."""
    items, rows = [], []
    for i, k in enumerate(n_options):
        texts = [f"text {c}" for c in range(k)]
        shown = {"category": "c", "question": f"q{i}", "prompt": f"p{i}", "options": texts, "gold": i % k}
        items.append(item_of(i, task=task, family=family, group_id=group(i), **shown))
        for permutation, order in enumerate(itertools.permutations(range(k))):
            if (i, permutation) in left_out:
                continue
            best = choose(order, i % k)
            for option, content in enumerate(order):
                value = -1.0 if option == best else -2.0
                rows.append(score_of(i, option, value, task=task, permutation=permutation, content=content))
    return RunRecords(items=Items.from_rows(items), option_scores=OptionScores.from_rows(rows))


def _knows(order, gold):
    return order.index(gold)


def _says_a(order, gold):
    return 0


def test_items_with_a_text_in_common_are_drawn_together():
    """Both models answer the items of a passage alike, so that 24 passages of two items tell what 24 items do."""

    def found(group, n):
        runs = [
            _orders_run(lambda order, gold: order.index(gold), (2,) * n, group=group),
            _orders_run(lambda order, gold: 0 if gold else order.index(gold), (2,) * n, group=group),
        ]
        results = headline(compute_all(MetricInputs(*runs)))
        return {name: r for name, r in results.items() if name.startswith("robustness/orders")}

    alone, together = found(str, 48), found(lambda i: f"p{i % 24}", 48)
    few = found(lambda i: f"p{i % 19}", 48)
    for name, result in alone.items():
        assert result.value == together[name].value == few[name].value
        assert few[name].low is None
        if result.low is not None and result.low < result.high:
            assert together[name].high - together[name].low > 1.2 * (result.high - result.low), name


def test_all_orders_by_hand():
    found = headline(compute_all(MetricInputs(_orders_run(_knows), _orders_run(_says_a))))
    value = {name.removeprefix("robustness/orders_"): r.value for name, r in found.items() if "orders" in name}
    assert value["accuracy_baseline"] == value["robust_accuracy_baseline"] == value["agreement_baseline"] == 1.0
    assert value["position_bias_baseline"] == 0.0
    # "A" holds the gold in 6 of 24 orders (twice) and in 2 of 6: (1/4 + 1/4 + 1/3)/3. It is never right in all of them.
    assert value["accuracy"] == pytest.approx((0.25 + 0.25 + 1 / 3) / 3)
    assert value["robust_accuracy"] == 0.0 and value["robust_accuracy_delta"] == -1.0
    # Each of k contents stands first in m/k orders: k (m/k)(m/k - 1)/(m (m - 1)) is 5/23 for k = 4 and 1/5 for k = 3.
    assert value["agreement"] == pytest.approx((5 / 23 + 5 / 23 + 1 / 5) / 3)
    # Letters of "A" beyond their right share: 3/4, 3/4, 2/3 for A; the same below, over the others.
    assert value["position_bias"] == value["position_bias_delta"] == pytest.approx((0.75 + 0.75 + 2 / 3) / 3)
    assert value["accuracy_delta"] == pytest.approx(value["accuracy"] - 1.0)
    assert found["robustness/orders_accuracy"].n == 3
    assert {r.task for r in compute_all(MetricInputs(_orders_run(_knows)))} == {None, "t_orders"}


def test_half_a_model_is_between():
    # Right unless the gold stands last: 3/4 of the orders of four options; the wrong answer is the first shown.
    run = _orders_run(lambda order, gold: 0 if order[-1] == gold else order.index(gold), (4,))
    found = {name: r.value for name, r in headline(compute_all(MetricInputs(run))).items()}
    assert found["robustness/orders_accuracy"] == 0.75 and found["robustness/orders_robust_accuracy"] == 0.0
    # The gold 18 times, each other content twice: (18 x 17 + 3 x 2 x 1)/(24 x 23).
    assert found["robustness/orders_agreement"] == pytest.approx(312 / 552)
    # "A" is chosen 6 + 6 times of 24, "D" never: |1/4| + |1/4|, halved.
    assert found["robustness/orders_position_bias"] == pytest.approx(0.25)


def test_an_item_that_lacks_an_order_is_counted_apart():
    part = _orders_run(_says_a, left_out={(0, 7)})
    found = headline(compute_all(MetricInputs(_orders_run(_knows), part)))
    assert (found["robustness/orders_accuracy"].n, found["robustness/orders_accuracy"].n_unscored) == (2, 1)
    assert found["robustness/orders_agreement"].value == pytest.approx((5 / 23 + 1 / 5) / 2)
    assert compute_all(MetricInputs(_orders_run(_says_a, (4,), left_out={(0, 7)}))) == []


def test_other_orders_are_refused():
    swapped = _orders_run(_knows)
    rows = swapped.option_scores.table.to_pylist()
    for row in rows:
        if row["item_id"] == "0" and row["permutation"] in (1, 2):
            row["permutation"] = 3 - row["permutation"]
    with pytest.raises(AlignmentError, match="different answer orders"):
        compute_all(MetricInputs(_orders_run(_knows), replace(swapped, option_scores=OptionScores.from_rows(rows))))


def test_the_sample_of_all_orders_changes_nothing_else_and_shuffle_metrics_have_paired_differences():
    full = metric_records.inputs(30)
    without = MetricInputs(
        *(
            replace(
                run,
                items=run.items.without(task="mmlu_orders"),
                option_scores=run.option_scores.without(task="mmlu_orders"),
                option_distances=run.option_distances and run.option_distances.without(task="mmlu_orders"),
            )
            for run in (full.baseline, full.variant, full.noise)
        ),
        embeddings=full.embeddings,
    )
    assert compute_all(without) == [r for r in compute_all(full) if not r.name.startswith("robustness/orders_")]
    # Every order of a sample is no shuffle of the others.
    alone = _orders_run(_knows)
    assert unmet(MetricInputs(alone))["answer_order"] == "no item of the family lettered"
    plain = _orders_run(_knows, (4,), task="t", family="lettered", left_out={(0, p) for p in range(1, 24)})
    both = RunRecords(
        items=Items.concat([plain.items, alone.items]),
        option_scores=OptionScores.concat([plain.option_scores, alone.option_scores]),
    )
    assert unmet(MetricInputs(both))["answer_order"] == "the baseline was not scored under shuffled answer orders"
    assert headline(compute_all(MetricInputs(both)))["quality/accuracy"].n == 1
    found = {name: r for name, r in headline(compute_all(full)).items() if name.startswith("robustness/")}
    for name in ("content_consistency", "position_bias", "shuffle_drop"):
        end = "_pct" if name == "shuffle_drop" else ""
        delta = found[f"robustness/{name}_delta{end}"]
        both = found[f"robustness/{name}{end}"].value - found[f"robustness/{name}{end}_baseline"].value
        assert delta.value == pytest.approx(both)
        assert delta.low <= delta.value <= delta.high
    # Over complete items the bias is the total variation between the letters' two distributions.
    letter, gold = np.random.default_rng(0).integers(0, 4, size=(2, 50, 3))
    chosen, right = (np.bincount(x.ravel(), minlength=4) / x.size for x in (letter, gold))
    assert _bias(letter, gold, 4) == pytest.approx(np.abs(chosen - right).sum() / 2)


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
    run = MetricInputs(RunRecords(judgments=_judged(BASE)), RunRecords(judgments=_judged(VARIANT)))
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
    noise = {"judge/mt_bench_noise", "judge/mt_bench_noise_sd"}  # of the judge, whatever the category
    assert {r.name for r in by_category} == set(found) - noise


def _show_result(scores):
    """FastChat's `show_result` in single mode: rows with a score of -1 are dropped, then the mean of all others."""
    rows = [(turn, -1 if score is None else score) for (_, turn, _), score in scores.items()]
    kept = [(turn, score) for turn, score in rows if score != -1]
    by_turn = [[score for t, score in kept if t == turn] for turn in (0, 1)]
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    return mean([score for _, score in kept]), *(mean(values) if values else None for values in by_turn)


def test_pooled_score_weights_answers_not_turns():
    # Turn 1: 9 and 3, turn 2: 2 and one without a readable score. All answers: 14/3; the mean of the turns' means is 4.
    scores = {("a", 0, 0): 9.0, ("a", 1, 0): 2.0, ("b", 0, 0): 3.0, ("b", 1, 0): None}
    run = MetricInputs(RunRecords(judgments=_judged(BASE)), RunRecords(judgments=_judged(scores)))
    found = headline(compute_all(run))
    assert found["judge/mt_bench"].value == pytest.approx(14 / 3)
    assert (found["judge/mt_bench"].n, found["judge/mt_bench"].n_unscored) == (3, 1)
    # Shared answers: 9 - 8, 2 - 6, 3 - 4; the mean is -4/3.
    assert found["judge/mt_bench_delta"].value == pytest.approx(-4 / 3)
    assert found["judge/mt_bench_delta"].n == 3


@pytest.mark.parametrize("seed", range(5))
def test_scores_equal_fastchat(seed):
    rng = np.random.default_rng(seed)
    scores = {
        (f"q{i}", turn, 0): None if rng.random() < 0.25 else float(rng.integers(1, 11))
        for i in range(20)
        for turn in (0, 1)
    }
    found = headline(compute_all(MetricInputs(RunRecords(judgments=_judged(scores)))))
    ours = [found[f"judge/mt_bench{part}"].value for part in ("", "_turn1", "_turn2")]
    assert ours == pytest.approx(list(_show_result(scores)))


def test_turns_without_a_readable_score_are_counted_or_left_out():
    scores = {key: score if key[1] == 0 else None for key, score in BASE.items()}
    found = headline(compute_all(MetricInputs(RunRecords(judgments=_judged(scores)))))
    assert (found["judge/mt_bench"].value, found["judge/mt_bench"].n, found["judge/mt_bench"].n_unscored) == (6.0, 2, 2)
    only = {key: score for key, score in BASE.items() if key[1] == 0}
    found = headline(compute_all(MetricInputs(RunRecords(judgments=_judged(only)))))
    assert set(found) == {"judge/mt_bench", "judge/mt_bench_turn1"}
    assert found["judge/mt_bench"].value == 6.0
    assert compute_all(MetricInputs(RunRecords(judgments=_judged(dict.fromkeys(BASE))))) == []


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
        compute_all(MetricInputs(RunRecords(judgments=_judged(BASE)), RunRecords(judgments=_judged(other))))
