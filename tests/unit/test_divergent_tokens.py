"""Where greedy answers part, and KL on the baseline's own text: values derived by hand, a library, and identities."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import poisson
from statsmodels.duration.survfunc import SurvfuncRight

from mlflow_compress import records
from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics import MetricInputs, compute_all, headline, unmet
from mlflow_compress.metrics.greedy_answers import Forks, Survival, first_difference, forced_tokens, forks, still_equal
from mlflow_compress.metrics.kl_by_position import position_names
from mlflow_compress.metrics.stats.intervals import share_interval
from mlflow_compress.reporting.numbers import number_text
from tests.metric_records import QUICK

PROMPT = [7, 7]
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def answers(kind: Any, given: Sequence[Sequence[int]], *, task: str = "instructions", **more: Sequence[Any]) -> Any:
    """One answer per prompt; `more` are further columns."""
    rows = []
    for number, tokens in enumerate(given):
        row = {"task": task, "item_id": f"i{number}", "sample": 0, "prompt_tokens": PROMPT, "tokens": list(tokens)}
        rows.append({**row, "text": "", **{name: values[number] for name, values in more.items()}})
    return kind.from_rows(rows)


def scores(kind: Any, of: Any, argmax: Sequence[Sequence[int]]) -> Any:
    rows = []
    for window, row, most in zip(of.windows(), of.table.to_pylist(), argmax, strict=True):
        for place, (token, top) in enumerate(zip(row["tokens"], most, strict=True)):
            key = {"task": row["task"], "item_id": window, "position": len(PROMPT) + place, "target": token}
            rows.append({**key, "nll": 1.0, "p_target": 0.4, "argmax": top, "entropy": 1.0})
    return kind.from_rows(rows)


def distances(kind: Any, of: Any, kl: Sequence[Sequence[float]]) -> Any:
    rows = []
    for window, row, values in zip(of.windows(), of.table.to_pylist(), kl, strict=True):
        for place, value in enumerate(values):
            key = {"task": row["task"], "item_id": window, "position": len(PROMPT) + place}
            same = {"same_top": True, "top10": 1.0, "rbo10": 1.0}
            rows.append({**key, "kl": value, "kl_reverse": value, "js": 0.0, "tv": 0.0, **same})
    return kind.from_rows(rows)


def compared(
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
    argmax: Sequence[Sequence[int]],
    kl: Sequence[Sequence[float]],
) -> MetricInputs:
    baseline = answers(records.GreedyAnswers, ours)
    return MetricInputs(
        records.RunRecords(greedy_answers=baseline, greedy_scores=scores(records.GreedyScores, baseline, ours)),
        records.RunRecords(
            greedy_answers=answers(records.GreedyAnswers, theirs),
            greedy_scores=scores(records.GreedyScores, baseline, argmax),
            greedy_distances=distances(records.GreedyDistances, baseline, kl),
        ),
    )


# Three prompts: equal to the end; the second of four tokens differs; the variant goes on where the baseline ended (2).
OURS = [[5, 6, 2], [5, 6, 8, 2], [5, 2]]
THEIRS = [[5, 6, 2], [5, 9], [5, 7, 7, 2]]
FORCED = [[5, 6, 2], [5, 9, 8, 3], [5, 7]]
KL = [[0.0, 0.1, 0.2], [0.1, 0.8, 0.4, 0.2], [0.0, 0.5]]
FOUND = headline(compute_all(compared(OURS, THEIRS, FORCED, KL)))


def test_answers_part_and_diverge_where_it_was_derived_by_hand() -> None:
    found = forks(compared(OURS, THEIRS, FORCED, KL))
    assert found.time.tolist() == [3, 2, 2] and found.differs.tolist() == [False, True, True]
    assert FOUND["judge/identical_answers_pct"].value == pytest.approx(100 / 3)
    # Two of three differ at token 2: S(2) = 1/3, and half have parted there.
    assert FOUND["judge/first_divergent_token"].value == 2.0 and FOUND["judge/first_divergent_token"].n == 3
    # Of the 9 tokens 9, 3 and 7 are not the answer's: the first of an answer's events is its first divergent token.
    assert FOUND["judge/share_of_divergent_tokens_pct"].value == pytest.approx(100 * 3 / 9)
    assert FOUND["judge/share_of_divergent_tokens_floor_pct"].value == 0.0
    assert FOUND["judge/kl_greedy"].value == pytest.approx(2.3 / 9)
    # To the fork and with it: all of the first, two of the second, both of the third answer.
    assert FOUND["judge/kl_to_fork"].value == pytest.approx((0.3 + 0.9 + 0.5) / 7)
    assert FOUND["judge/kl_to_fork"].n == 7
    assert FOUND["judge/kl_behind_fork"].value == pytest.approx((0.4 + 0.2) / 2)


def test_the_order_of_records_does_not_matter_and_equal_answers_have_no_median() -> None:
    inputs = compared(OURS, THEIRS, FORCED, KL)
    turned = records.GreedyAnswers(inputs.variant.greedy_answers.table.take([2, 0, 1]))
    moved = replace(inputs, variant=replace(inputs.variant, greedy_answers=turned))
    assert forks(moved).time.tolist() == forks(inputs).time.tolist()
    zero = [[0.0] * len(answer) for answer in OURS]
    found = headline(compute_all(compared(OURS, OURS, OURS, zero)))
    assert found["judge/identical_answers_pct"].value == 100.0
    assert found["judge/share_of_divergent_tokens_pct"].value == found["judge/kl_greedy"].value == 0.0
    assert "judge/first_divergent_token" not in found and "judge/kl_behind_fork" not in found


def test_other_prompts_and_other_answers_are_refused() -> None:
    inputs = compared(OURS, THEIRS, FORCED, KL)
    rows = inputs.variant.greedy_answers.table.to_pylist()
    rows[1]["prompt_tokens"] = [7, 8]
    other = replace(inputs, variant=replace(inputs.variant, greedy_answers=records.GreedyAnswers.from_rows(rows)))
    with pytest.raises(AlignmentError, match=r"different prompts.*'i1'"):
        forks(other)
    assert inputs.baseline.greedy_answers is not None
    longer = records.GreedyAnswers.from_rows([{**row, "tokens": [*row["tokens"], 1]} for row in rows])
    with pytest.raises(DataError, match="every token"):
        forced_tokens(replace(inputs, baseline=replace(inputs.baseline, greedy_answers=longer)))


@QUICK
@given(TOKENS, TOKENS)
def test_the_first_difference_is_the_end_of_the_longest_common_beginning(a: list[int], b: list[int]) -> None:
    index = first_difference(a, b)
    assert (index is None) == (a == b) and first_difference(b, a) == index
    if index is not None:
        assert a[:index] == b[:index] and a[index : index + 1] != b[index : index + 1]


def curve_of(times: Sequence[int], differs: Sequence[bool]) -> Survival:
    return still_equal(Forks(np.array(times), np.array(differs, dtype=bool)))


def test_the_share_that_is_still_the_same_derived_by_hand() -> None:
    # Parted at 3, 5 and 5; equal to the end after 1 and 8 tokens: those never part, however short they are.
    curve = curve_of([3, 5, 5, 8, 1], [True, True, True, False, False])
    assert curve.times.tolist() == [3, 5] and curve.share.tolist() == [4 / 5, 2 / 5]
    assert (curve.low[0], curve.high[0]) == pytest.approx(tuple(share_interval(4, 5)))
    # At token 3 the interval of 4 of 5 begins at 0.376, at token 5 that of 2 of 5 ends at 0.769.
    assert (curve.median, curve.median_interval) == (5.0, (3.0, None))
    none = curve_of([3, 4], [False, False])
    assert none.median is None and len(none.times) == 0
    every = curve_of([2] * 12, [True] * 12)
    assert every.share.tolist() == [0.0] and (every.median, every.median_interval) == (2.0, (2.0, 2.0))


def test_a_median_without_an_upper_end_says_so() -> None:
    """Of six answers, three part at token 2 and one at 3: 3 of 6 [0.188, 0.812], then 2 of 6 [0.097, 0.700]."""
    tokens = [[5, 5, 5, 2]] * 6
    theirs = [[5, 1, 5, 2]] * 3 + [[5, 5, 1, 2]] + tokens[:2]
    zero = [[0.0] * 4] * 6
    found = headline(compute_all(compared(tokens, theirs, tokens, zero)))["judge/first_divergent_token"]
    assert (found.value, found.low, found.high) == (2.0, 2.0, None)
    assert number_text(found, "tokens") == "2 [2 or more]"
    assert number_text(replace(found, value=5.0), "tokens") == "5 [2 or more]"


@QUICK
@given(st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=1, max_size=30))
def test_the_curve_is_the_survival_curve_of_statsmodels_where_equal_answers_outlast_all(
    observed: list[tuple[int, bool]],
) -> None:
    times, differs = (list(column) for column in zip(*observed, strict=True))
    if not any(differs):
        return  # statsmodels has no curve then
    ours = curve_of(times, differs)
    theirs = SurvfuncRight([t if d else 99 for t, d in observed], [int(d) for d in differs])
    assert ours.times.tolist() == theirs.surv_times.tolist()
    assert ours.share == pytest.approx(theirs.surv_prob)
    low, high = ours.median_interval
    if ours.median is not None:
        assert low is not None and low <= ours.median <= (np.inf if high is None else high)
        assert np.mean([d and t <= ours.median for t, d in observed]) >= 0.5


def test_the_medians_interval_covers_what_it_says() -> None:
    """Answers part at token 1 + Poisson(5) with 70 %, else never: the true median is 7, by summing the distribution."""
    rng, n, covered, draws = np.random.default_rng(0), 48, 0, 1000
    parts = 0.7 * poisson.cdf(np.arange(20), 5)
    truth = 1 + int(np.argmax(parts >= 0.5))
    for _ in range(draws):
        low, high = curve_of(1 + rng.poisson(5, n), rng.random(n) < 0.7).median_interval
        covered += (low is None or low <= truth) and (high is None or truth <= high)
    assert truth == 7 and 0.93 <= covered / draws <= 1.0, covered / draws


def traced(**reasoning: Sequence[Any]) -> MetricInputs:
    """Two answers of 4 and 3 tokens with known KL, next to a corpus that is no trace."""
    text = answers(records.Traces, [[1, 2, 3, 4], [5, 6, 7]], task="traces", **reasoning)
    kl = [[0.1, 0.2, 0.3, 0.8], [0.3, 0.4, 0.6]]
    other = answers(records.Traces, [[1, 1]], task="wiki")
    base = records.TokenScores.concat(
        [scores(records.TokenScores, text, [[0] * 4, [0] * 3]), scores(records.TokenScores, other, [[0, 0]])]
    )
    moved = records.TokenDistances.concat(
        [distances(records.TokenDistances, text, kl), distances(records.TokenDistances, other, [[9.0, 9.0]])]
    )
    return MetricInputs(
        records.RunRecords(token_scores=base, traces=text),
        records.RunRecords(token_scores=base, token_distances=moved, traces=text),
    )


def test_kl_by_position_and_reasoning_is_that_derived_by_hand() -> None:
    found = {r.category: r for r in compute_all(traced()) if r.name == "distance/traces_kl"}
    assert list(found) == [None, "token 1", "tokens 2-3", "tokens 4-7"]
    assert found[None].value == pytest.approx(2.7 / 7) and found[None].task is None
    assert found["token 1"].value == pytest.approx(0.2) and found["token 1"].task == "traces"
    assert found["tokens 2-3"].value == pytest.approx((0.2 + 0.3 + 0.4 + 0.6) / 4)
    assert found["tokens 4-7"].value == pytest.approx(0.8) and found["tokens 4-7"].low is None  # one answer
    inputs = traced(reasoning_begin=[1, None], reasoning_end=[3, None])
    found = {r.category: r.value for r in compute_all(inputs) if r.name == "distance/traces_kl"}
    assert found["reasoning"] == pytest.approx((0.2 + 0.3) / 2)
    assert found["answer"] == pytest.approx((0.1 + 0.8 + 0.3 + 0.4 + 0.6) / 5)
    assert position_names(1) == ["token 1"]
    assert position_names(8)[-1] == "tokens 8-15" and position_names(7)[-1] == "tokens 4-7"


def test_the_reason_is_given_where_nothing_was_decoded() -> None:
    reasons = unmet(MetricInputs(records.RunRecords(), records.RunRecords()))
    assert reasons["first_divergent_token"] == "the baseline has no greedy_answers records"
    assert reasons["kl_by_position"] == "the baseline wrote no text of its own (tasks=traces)"
