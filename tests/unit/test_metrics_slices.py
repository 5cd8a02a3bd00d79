"""Slices: the worst task, category or script is found, named with its test, shown, and read by a policy."""

from dataclasses import replace

import numpy as np
import pytest

from mlflow_compress.config.policy import MetricGate, Policy
from mlflow_compress.decide.promotion import gates_of, read_gates
from mlflow_compress.metrics import AnswerSamples, MetricInputs, MetricSettings, compute_all, headline
from mlflow_compress.metrics.core.metric_registry import compute
from mlflow_compress.metrics.health import WORST_SLICE
from mlflow_compress.metrics.slices import WORST_DROP, WORST_FLIPS, slicings
from mlflow_compress.metrics.stats.intervals import share_interval
from mlflow_compress.metrics.stats.significance import holm, larger_part_p
from mlflow_compress.records import Draws, Generations, Items, MetricResult, OptionScores, RunRecords
from mlflow_compress.reporting.html import render_report
from mlflow_compress.reporting.tables import result_text
from mlflow_compress.reporting.verdict import slice_findings, verdict, worst_slice
from tests.metric_records import generations_of, item_of, score_of

TEXT = {"greek": "Ποιο είναι το αποτέλεσμα;", "other": "Which one is it?"}


def records(flipped: dict[str, tuple[int, int]], *, question: dict[str, str] | None = None) -> MetricInputs:
    """Two-option items whose baseline is always right; per category, how many of how many the variant has wrong."""
    items, ours, theirs = [], [], []
    for category, (wrong, n) in flipped.items():
        for i in range(n):
            name, text = f"{category}{i}", (question or {}).get(category, TEXT["other"])
            shown = {"category": category, "question": text, "prompt": text}
            items.append(item_of(name, task="quiz", family="cloze", **shown))
            for option in (0, 1):
                ours.append(score_of(name, option, -1.0 - option, task="quiz"))
                theirs.append(score_of(name, option, -1.0 - (option if i >= wrong else 1 - option), task="quiz"))
    table = Items.from_rows(items)
    baseline = RunRecords(items=table, option_scores=OptionScores.from_rows(ours))
    return MetricInputs(baseline, RunRecords(items=table, option_scores=OptionScores.from_rows(theirs)))


def found(inputs: MetricInputs) -> list[MetricResult]:
    from mlflow_compress.metrics import METRICS

    return METRICS.get("slices").function(inputs) + compute("flips", inputs) + compute("accuracy_delta", inputs)


@pytest.fixture
def without_kl(monkeypatch):
    """No options are scored for distances: the records have none."""
    from mlflow_compress.metrics.core.item_table import ItemTable

    monkeypatch.setattr(ItemTable, "scored", ())


def test_the_largest_lower_end_is_seldom_above_a_truth_that_all_slices_share(without_kl):
    """Of four slices of 100 items in which 2 % flip. One set in forty is due."""
    rng, above = np.random.default_rng(3), 0
    for _ in range(60):
        flips = rng.binomial(100, 0.02, 4).tolist()
        worst = headline(found(records({name: (k, 100) for name, k in zip("abcd", flips, strict=True)})))
        above += worst[WORST_FLIPS.name].low > 2.0
    assert above <= 5  # of which more than five have a probability of 0.3 %


def test_by_hand(without_kl):
    # 34 of 300 Greek items flipped, 29 of 700 others: 11.3 % and 4.1 %. Every flip is a loss.
    results = found(records({"el": (34, 300), "en": (29, 700)}, question={"el": TEXT["greek"]}))
    by_place = {(r.name, r.task, r.category): r for r in results}
    greek = by_place[WORST_FLIPS.name, None, "Greek script"]
    assert greek.value == pytest.approx(100 * 34 / 300)
    assert (greek.low, greek.high) == pytest.approx([100 * end for end in share_interval(34, 300)])
    assert by_place[WORST_DROP.name, "quiz", "el"].value == pytest.approx(100 * 34 / 300)
    # Slices: two categories, two scripts, two distances. Each p-value is the permutation test's times at most 8.
    assert len(slice_findings(results)) == 8
    alone = larger_part_p(np.r_[np.ones(34), np.zeros(266), np.ones(29), np.zeros(671)], np.repeat([0, 1], [300, 700]))
    assert 0 < greek.p <= 8 * alone[0] + 1e-3 and alone[0] <= 0.001
    pooled = headline(results)[WORST_FLIPS.name]
    assert pooled.value == greek.value and pooled.high == pytest.approx(greek.high) and pooled.low <= greek.low
    sentence = worst_slice(results)
    # The headline's interval, not the slice's own [8.0, 15.4]: one number has one interval.
    assert result_text(pooled) == "11.3 % [7.2, 15.4]"
    assert sentence.startswith(f"worst slice: quiz/el: flips {result_text(pooled)}, others 4.1 % (p 0.0")
    assert sentence.endswith("Holm over 8 tests)")
    assert f"; {sentence}; " in verdict("x", headline(results), size_ratio=4.0, slices=sentence)
    page = render_report(title="t", verdict="v", results=results)
    assert "<h2>Slices</h2>" in page and "Greek script" in page


def test_a_slice_that_is_no_worse_is_not_named(without_kl):
    results = found(records({"a": (12, 300), "b": (30, 700)}))
    assert worst_slice(results) == "" and slice_findings(results)[0].result.p > 0.05


def test_a_policy_reads_the_largest_upper_end_of_any_slice(without_kl):
    results = found(records({"a": (4, 100), "b": (6, 100), "c": (1, 20)}))
    ends = {r.category: r for r in results if r.name == WORST_FLIPS.name and r.category}
    # 5 % of 20 items: its upper end is the largest although the largest value, 6 %, is that of "b".
    assert max(ends, key=lambda name: ends[name].high) == "c"
    limit = ends["c"].high
    for at_most, passes in ((limit + 0.01, True), (limit - 0.01, False)):
        policy = Policy(kl=None, margins=(), gates=(MetricGate(metric=WORST_FLIPS.name, at_most=at_most),))
        gates = gates_of(policy)
        [check] = gates.gates[0].checks(read_gates(results, gates.readings))
        assert check.passed == passes and "quiz/c" in check.reason
        assert (check.p_value <= 0.025) == passes  # the largest p-value of the three: that of "c"
    [lost] = gates.gates[0].checks({})
    assert not lost.passed and "missing" in lost.reason


def test_slices_are_tasks_categories_scripts_and_languages_but_what_all_share_is_none():
    sliced = slicings(["a", "a", "b"], ["x", "y", None], ["one", "δύο", "42"])
    assert [list(s.names) for s in sliced] == [
        [("a", None), ("b", None)],
        [("a", "x"), ("a", "y")],
        [(None, "Greek script"), (None, "Latin script")],
    ]
    assert sliced[1].code.tolist() == [0, 1, 2] and sliced[2].code.tolist() == [1, 0, 2]
    assert slicings(["a"] * 3, ["x"] * 3, ["one"] * 3) == []
    english, german, greek = "There was a little dog.", "Es war ein kleiner Hund.", "Ήταν ένα μικρό σκυλί."
    [sliced] = slicings(["a"] * 4, [None] * 4, [english, german, english, "dog"])
    assert list(sliced.names) == [(None, "language de"), (None, "language en")]
    assert sliced.code.tolist() == [1, 0, 1, 2]
    [sliced] = slicings(["a"] * 2, [None] * 2, [english, greek])
    assert list(sliced.names) == [(None, "Greek script"), (None, "Latin script")]


def test_small_slices_and_drawn_items_have_no_test(without_kl):
    assert found(records({"a": (5, 19), "b": (1, 300)}))[0].name != WORST_FLIPS.name
    from mlflow_compress.metrics import unmet
    from tests.metric_records import inputs

    full = inputs(30)
    keys = full.baseline.items.key_rows()[::2]
    rows = [{"task": t, "item_id": i, "stratum": 0, "stratum_size": 2 * len(keys), "drawn": len(keys)} for t, i in keys]
    drawn = replace(full.variant.of_items(keys), draws=Draws.from_rows(rows))
    assert "drawn ones" in unmet(MetricInputs(full.baseline, drawn))["slices"]


def named_rate(draw, sizes, *, groups=None, reps=200) -> np.ndarray:
    """Return how often each part is the one with the smallest p-value, where that is below 0.05 after Holm."""
    parts, named = np.repeat(np.arange(len(sizes)), sizes), np.zeros(len(sizes))
    for seed in range(reps):
        p = holm(larger_part_p(draw(np.random.default_rng(seed), parts), parts, groups, seed=seed))
        named[p.argmin()] += p.min() < 0.05
    return named / reps


# With a true rate of 5 % more than 8.5 % are named in fewer than 1 in 50 sets of 200.
MOST = 0.085
UNEQUAL = [700, 100, 60, 60, 40, 40]


@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda rng, parts: (rng.random(len(parts)) < 0.04).astype(float), id="flips"),
        pytest.param(lambda rng, parts: np.minimum(rng.lognormal(-4, 1.5, len(parts)), 1.0), id="clipped KL"),
        pytest.param(lambda rng, parts: rng.choice([-1.0, 0, 1], len(parts), p=[0.03, 0.94, 0.03]), id="accuracy"),
    ],
)
def test_false_alarms_of_equal_slices_are_rare(draw):
    assert named_rate(draw, UNEQUAL).sum() <= MOST


def test_false_alarms_of_grouped_items_are_rare_only_if_groups_stay_together():
    def draw(rng, parts):
        return ((rng.random(250) < 0.3).repeat(4) & (rng.random(1000) < 0.6)).astype(float)

    assert named_rate(draw, UNEQUAL, groups=np.arange(1000) // 4).sum() <= MOST
    assert named_rate(draw, UNEQUAL, reps=50).sum() > 0.15  # the test can tell


def test_a_planted_worst_slice_is_found_with_power():
    # 12 % of 200 items against 4 % of 800: 3.3 standard errors.
    def draw(rng, parts):
        return (rng.random(len(parts)) < np.where(parts == 2, 0.12, 0.04)).astype(float)

    named = named_rate(draw, [200] * 5, reps=50)
    assert named[2] >= 0.8 and named.sum() - named[2] <= 0.02


def test_p_values_by_hand():
    # Of the 4!/(2! 2!) = 6 ways to put 3, 2, 1, 0 into two parts one has the observed difference of 2 or more.
    p = larger_part_p([3.0, 2.0, 1.0, 0.0], [0, 0, 1, 1], seed=3)
    assert p[0] == pytest.approx(1 / 6, abs=0.12) and p[1] == pytest.approx(1.0, abs=0.05)
    assert larger_part_p([1.0, 2.0], [0, 0]).tolist() == [1.0]
    assert larger_part_p(np.zeros(40), np.repeat([0, 1], 20)).tolist() == [1.0, 1.0]


def test_defects_of_answers_by_category_of_the_instruction():
    def answers(broken: int) -> Generations:
        texts = {f"{i:02d}": ["" if i < broken else "Fine."] for i in range(60)}
        return generations_of(texts, task="instructions", n_tokens=2)

    ids = [f"{i:02d}" for i in range(60)]
    samples = AnswerSamples(
        answers(0),
        answers(12),
        dict.fromkeys(ids, "Which?"),
        16,
        categories={i: "coding" if int(i) < 30 else "writing" for i in ids},
    )
    inputs = MetricInputs(RunRecords(), RunRecords(), samples=samples, settings=MetricSettings(resamples=100))
    results = [r for r in compute_all(inputs) if r.name == WORST_SLICE.name]
    assert [(r.category, r.value) for r in results] == [(None, 40.0), ("coding", 40.0), ("writing", 0.0)]
    assert results[1].p < 0.01 < results[2].p
