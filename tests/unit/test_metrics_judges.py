"""Several judge models, repeated gradings, and comparisons in pairs: values derived by hand, and identities."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm
from sklearn.metrics import cohen_kappa_score

from mlflow_compress.metrics import MetricInputs, MetricSettings, compute_all, unmet
from mlflow_compress.metrics.judge_scores import score_interval
from mlflow_compress.metrics.raters import cohen_kappa, krippendorff_alpha, rater_agreement
from mlflow_compress.metrics.stats.intervals import Interval, paired_difference, wilson
from mlflow_compress.metrics.win_rate import preference_interval
from mlflow_compress.records import Judgments, MetricResult, RunRecords
from tests.roundoff import of_sum

Grades = Mapping[str, Sequence[Sequence[float | None]]]
"""By task: per question, the grade of each repeat (turn 0)."""


def judgments(grades: Grades) -> Judgments:
    rows = [
        {"task": task, "item_id": f"q{i}", "turn": 0, "repeat": r, "category": "c", "score": score, "judge": "j"}
        for task, questions in grades.items()
        for i, repeats in enumerate(questions)
        for r, score in enumerate(repeats)
    ]
    return Judgments.from_rows(rows)


def compute(baseline: Grades, variant: Grades) -> dict[tuple[str, str | None], MetricResult]:
    inputs = MetricInputs(
        baseline=RunRecords(judgments=judgments(baseline)), variant=RunRecords(judgments=judgments(variant))
    )
    return {(r.name, r.task): r for r in compute_all(inputs) if r.category is None}


def test_several_judge_models_never_share_a_number() -> None:
    base = {"mt_bench/a": [[4], [6]], "mt_bench/b": [[8], [2]]}
    found = compute(base, {"mt_bench/a": [[5], [7]], "mt_bench/b": [[8], [None]]})
    values = {key: result.value for key, result in found.items()}
    assert values["judge/mt_bench", "a"] == 6 and values["judge/mt_bench", "b"] == 8
    assert values["judge/mt_bench_delta", "a"] == 1 and values["judge/mt_bench_delta", "b"] == 0
    assert ("judge/mt_bench", None) not in values
    # Both have graded the variant's first answer only: (5 + 8) / 2. The baseline's: (6 + 4) / 2, and 6 for the first.
    assert values["judge/mt_bench_panel", None] == 6.5
    assert values["judge/mt_bench_panel_baseline", None] == 5.0
    assert values["judge/mt_bench_panel_delta", None] == 0.5
    assert found["judge/mt_bench_panel", None].n == 1
    assert found["judge/agreement_kappa", "a and b"].n == 3 == found["judge/agreement_kappa", None].n


def test_one_judge_model_has_no_agreement_and_equal_models_and_judges_do_not_differ() -> None:
    found = compute({"mt_bench": [[4], [6]]}, {"mt_bench": [[5], [7]]})
    assert found["judge/mt_bench", None].value == 6
    assert not [name for name, _ in found if "agreement" in name or "panel" in name or "noise" in name]
    same = MetricInputs(baseline=RunRecords(judgments=judgments({"mt_bench": [[4]]})))
    assert {"judge_panel", "judge_noise"} <= set(unmet(same))
    grades = {f"mt_bench/{judge}": [[1, 2], [3, 4], [9, 9]] for judge in "abc"}
    values = {key: result.value for key, result in compute(grades, grades).items()}
    assert values["judge/mt_bench_panel_delta", None] == 0
    assert values["judge/mt_bench_panel", None] == values["judge/mt_bench_panel_baseline", None]
    for name in ("judge/agreement_kappa", "judge/agreement_alpha"):
        assert {values[name, task] for task in (None, "a and b", "a and c", "b and c")} == {1.0}


def test_kappa_by_hand() -> None:
    # Squared differences: observed mean 1/3; over all nine pairs of a grade of each, mean 1. So 1 - 1/3.
    assert cohen_kappa([1, 2, 3], [1, 2, 2]) == pytest.approx(2 / 3)
    assert cohen_kappa([5, 5], [5, 5]) is None


@given(st.lists(st.tuples(st.integers(1, 10), st.integers(1, 10)), min_size=2, max_size=40))
def test_kappa_is_that_of_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    one, other = zip(*pairs, strict=True)
    found = cohen_kappa(one, other)
    if found is None:
        assert len({*one, *other}) == 1
        return
    expected = cohen_kappa_score(one, other, labels=list(range(1, 11)), weights="quadratic")
    assert found == pytest.approx(expected, abs=of_sum(512))  # 100 cells


def test_alpha_is_that_of_krippendorffs_example() -> None:
    # K. Krippendorff, Computing Krippendorff's Alpha-Reliability (2011): three coders, 15 units; interval data 0.811.
    coders = {
        "A": "* * * * * 3 4 1 2 1 1 3 3 * 3",
        "B": "1 * 2 1 3 3 4 3 * * * * * * *",
        "C": "* * 2 1 3 4 4 * 2 1 1 3 3 * 4",
    }
    ratings: dict[str, dict[Any, float]] = {
        coder: {unit: float(value) for unit, value in enumerate(text.split()) if value != "*"}
        for coder, text in coders.items()
    }
    assert krippendorff_alpha(ratings) == pytest.approx(0.811, abs=5e-4)
    assert krippendorff_alpha({"a": {1: 5.0}, "b": {1: 5.0}}) is None
    assert krippendorff_alpha({"a": {1: 5.0}, "b": {2: 4.0}}) is None


def agreed(ratings: Mapping[str, Mapping[Any, float]], **settings: Any) -> dict[tuple[str, str | None], MetricResult]:
    found = rater_agreement(ratings, lambda key: key[0], MetricSettings(**settings), kappa="kappa", alpha="alpha")
    return {(result.name, result.task): result for result in found}


def test_agreement_has_an_interval_over_questions() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(1, 10, size=60).astype(float)
    ratings = {who: {(q, turn): truth[q] + rng.integers(0, 2) for q in range(60) for turn in (0, 1)} for who in "abc"}
    found = agreed(ratings)
    assert found.keys() == {(n, t) for n in ("kappa", "alpha") for t in (None, "a and b", "a and c", "b and c")}
    for result in found.values():
        assert 0.9 < result.low < result.value < result.high < 1.0
    # A question whose two turns are equal counts once: the interval is that of the first turns alone, as wide.
    doubled = {who: {(q, t): given[q, 0] for q in range(60) for t in (0, 1)} for who, given in ratings.items()}
    single = {who: {(q, 0): given[q, 0] for q in range(60)} for who, given in ratings.items()}
    for name in ("kappa", "alpha"):
        wide, narrow = agreed(single)[name, "a and b"], agreed(doubled)[name, "a and b"]
        assert wide.low == pytest.approx(narrow.low, abs=0.002) and wide.high == pytest.approx(narrow.high, abs=0.002)


@given(st.lists(st.lists(st.sampled_from([1.0, 2.0, 5.0, None]), min_size=3, max_size=3), min_size=3, max_size=12))
def test_the_interval_is_around_the_librarys_value(rows: list[list[float | None]]) -> None:
    """The formulas that are resampled give the libraries' values: one resample of every question once is the value."""
    ratings = {
        who: {(q,): row[i] for q, row in enumerate(rows) if row[i] is not None} for i, who in enumerate(("a", "b", "c"))
    }
    seen: dict[str, list[float]] = {"kappa": [], "alpha": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "mlflow_compress.metrics.core.metric_inputs.bootstrap",
            lambda columns, statistic, **_: (seen["kappa" if columns.shape[1] % 5 == 0 else "alpha"]).append(
                float(statistic(columns.mean(axis=0)))
            ),
        )
        found = agreed(ratings)  # type: ignore[arg-type]
    for name, values in seen.items():
        assert values == pytest.approx([result.value for key, result in found.items() if key[0] == name])


def test_the_judges_noise_by_hand() -> None:
    # Within answers: (4, 6) has squares 1 + 1, (7, 7) none; one degree of freedom each in both models: s^2 = 4 / 4 = 1.
    grades = {"mt_bench": [[4, 6], [7, 7]]}
    found = compute(grades, grades)
    assert found["judge/mt_bench_noise_sd", None].value == pytest.approx(1.0)
    # Mean of two answers of two grades: 1 x (1/2 + 1/2) / 4; the difference of two such means has twice that.
    assert found["judge/mt_bench_noise", None].value == pytest.approx(np.sqrt(0.5))
    steady = {"mt_bench": [[4, 4], [7, 7, 7]]}
    assert compute(steady, steady)["judge/mt_bench_noise", None].value == 0
    unread = {"mt_bench": [[4, None], [7, None]]}
    assert ("judge/mt_bench_noise", None) not in compute(unread, unread)


def test_the_noise_floor_is_the_spread_of_repeated_differences() -> None:
    rng = np.random.default_rng(0)
    truth = rng.uniform(3, 8, size=40)

    def graded() -> Grades:
        return {"mt_bench": [list(np.clip(rng.normal(mean, 0.8, size=2), 1, 10)) for mean in truth]}

    differences, floors = [], []
    for _ in range(60):
        found = compute_noise_only(graded(), graded())
        differences.append(found["difference"])
        floors.append(found["floor"])
    assert np.std(differences) == pytest.approx(np.mean(floors), rel=0.3)


def compute_noise_only(baseline: Grades, variant: Grades) -> dict[str, float]:
    from mlflow_compress.metrics.judge_scores import _grades, _noise

    groups = [_grades(judgments(grades)) for grades in (variant, baseline)]
    means = [float(np.mean([np.mean(g) for g in part])) for part in groups]
    return {"difference": means[0] - means[1], "floor": _noise(groups[0], groups[0] + groups[1])[1].value}


def test_the_interval_of_a_share_is_wilsons_of_a_win_rate_tangos_and_equal_turns_count_once() -> None:
    # 12 wins of 12: Wilson's lower end is 12/(12 + z²) = 12/15.84, where the bootstrap has [1, 1].
    assert preference_interval(np.array([[1, 0, 1]] * 12)) == pytest.approx((12 / (12 + 3.8415), 1.0), abs=1e-5)
    share = np.array([[1, 0, 1]] * 3 + [[0, 1, 1]] * 17)
    assert preference_interval(share) == pytest.approx(wilson(3, 20))
    ties = np.array([[1, 0, 1]] * 3 + [[0, 1, 1]] + [[0, 0, 1]] * 16)
    assert preference_interval(ties) == pytest.approx([(1 + d) / 2 for d in paired_difference(3, 1, 20)])
    # Both turns alike: the design effect is 2 G/(G - 1), and t(19) takes the place of z: 2.093/1.960.
    once = np.array([[1, 0, 1]] * 14 + [[0, 1, 1]] * 6)
    n = 20 * 19 / 20 / (2.0930 / 1.959964) ** 2
    expected = [(1 + d) / 2 for d in paired_difference(0.7 * n, 0.3 * n, n)]
    assert preference_interval(2 * once) == pytest.approx(expected, abs=1e-5)
    every = preference_interval(np.array([[2, 0, 2]] * 12))  # no spread: as 12 wins, with t(11) = 2.201
    assert every == pytest.approx((12 / (12 + 2.2010**2), 1.0), abs=1e-4)
    assert preference_interval(np.array([[2, 0, 2]])) is None


@pytest.mark.parametrize("questions", [12, 80])
@pytest.mark.parametrize(("wins", "losses"), [(0.05, 0.05), (0.02, 0.0), (0.9, 0.05), (0.3, 0.3)])
@pytest.mark.parametrize("correlation", [0.3, 0.8])
def test_win_rates_interval_covers_rare_wins_and_turns_that_depend(
    questions: int, wins: float, losses: float, correlation: float
) -> None:
    """Two turns a question, 400 draws: a coverage of 95 % has a standard error of 1.1 points. The bootstrap: 38 to 95 %."""
    rng, held, draws = np.random.default_rng(0), 0, 400
    for _ in range(draws):
        shared, own = rng.standard_normal((questions, 1)), rng.standard_normal((questions, 2))
        u = norm.cdf(np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * own)
        counts = np.column_stack([(u > 1 - wins).sum(axis=1), (u < losses).sum(axis=1), np.full(questions, 2)])
        low, high = preference_interval(counts)
        held += low - 1e-9 <= 0.5 + (wins - losses) / 2 <= high + 1e-9
    assert held / draws >= 0.92, held / draws


GRADE = Interval(1.0, 10.0)


def score_ends(grades: object) -> Interval | None:
    values = np.asarray(grades, dtype=np.float64)
    return score_interval(values, np.ones(len(values), dtype=np.int64), bounds=GRADE, level=0.95)


def test_the_intervals_of_few_and_of_equal_grades() -> None:
    # Twelve nines: of Beta(1, 12) 2.5 % lie above 1 - 0.025^(1/12) = 26.5 %, and the other grades are between 1 and 10.
    found = score_ends([9.0] * 12)
    assert found == pytest.approx((9 - 0.265 * 8, 9 + 0.265), rel=0.01)
    few = score_ends([6.0, 8.0, 10.0])
    assert few is not None and 1.0 < few.low < 6.0 and 9.0 < few.high < 10.0
    assert score_ends([9.0]) is None


def test_many_grades_have_the_interval_of_student() -> None:
    """Forty grades, 20 of 6 and 20 of 8: mean 7, standard error 1/sqrt(39), and t(39) = 2.0227."""
    assert score_ends([6.0, 8.0] * 20) == pytest.approx((7 - 2.0227 / 39**0.5, 7 + 2.0227 / 39**0.5), abs=1e-4)
    # A question with two grades counts twice: 20 with the sum 12 of two, 20 with 9 alone, of 60 grades 7 on average.
    found = score_interval(np.repeat([12.0, 9.0], 20), np.repeat([2, 1], 20), bounds=GRADE, level=0.95)
    assert found is not None and (found.low + found.high) / 2 == pytest.approx(7.0)


def test_few_grades_are_covered() -> None:
    """Ten questions, 600 draws: even grades; grades that are 10 but for 4 % of 1. The bootstrap covers 91 and 43 %."""
    rng, grades = np.random.default_rng(0), np.arange(1, 11)
    for chances in (np.full(10, 0.1), np.array([0.04, *[0.0] * 8, 0.96])):
        held = 0
        for _ in range(600):
            low, high = score_ends(rng.choice(grades, size=10, p=chances))
            held += low <= grades @ chances <= high
        assert held / 600 >= 0.93, held / 600
