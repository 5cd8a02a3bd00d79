"""KL against harm: what the benchmark computes of measured items, by hand, and what it has stored."""

import json
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from benchmarks import kl_against_harm
from mlflow_compress.decide.gates import Gate, published_gate
from mlflow_compress.decide.promotion import Candidate, decide, ends_for_all
from mlflow_compress.decide.separation import Difference
from mlflow_compress.metrics.stats.correlation import spearman
from mlflow_compress.metrics.stats.intervals import DesignEffect, wilson
from mlflow_compress.metrics.stats.significance import ERROR_RATE, OneEnd
from mlflow_compress.tracking.run_names import on_main_run
from tests.roundoff import of_sum


def measured(variants: int = 4, items: int = 200) -> kl_against_harm.Measured:
    """Return variants that change a tenth of the answers."""
    rng = np.random.default_rng(3)
    baseline = rng.random(items) < 0.6
    names = tuple(map(str, range(variants)))
    correct = baseline ^ (rng.random((variants, items)) < 0.1)
    return kl_against_harm.Measured(names, baseline, correct, rng.exponential(size=(variants, items)))


def difference(value: float, p_holm: float) -> Difference:
    return Difference(value=value, low=value, high=value, n=9, p=p_holm, p_holm=p_holm)


def test_harm_is_what_gets_worse_minus_what_gets_better_and_a_claim_may_be_wrong() -> None:
    """Of four items, the baseline has three right. One variant loses two and gains one, the other changes nothing."""
    baseline = np.array([True, True, True, False])
    one = kl_against_harm.Measured(
        ("a", "b"), baseline, np.array([[False, False, True, True], baseline]), np.zeros((2, 4))
    )
    assert one.harm.tolist() == [0.25, 0.0] and one.flips.tolist() == [0.75, 0.0]
    _, items = one.scored()[0]
    assert items is not None and items.flipped.tolist() == [1, 1, 0, 1] and items.correct.tolist() == [0, 0, 1, 1]
    # Of three pairs, two are told apart: the first rightly, the last the wrong way round; the second is not.
    tests = [difference(1.0, 0.01), difference(-1.0, 0.5), difference(-1.0, 0.01)]
    assert kl_against_harm.claims(tests, np.array([0.0, 1.0, 2.0])) == (True, 1, 3)
    assert kl_against_harm.claims(tests, np.array([0.0, 2.0, 1.0])) == (False, 2, 3)
    assert kl_against_harm.claims(tests, np.zeros(3)) == (True, 0, 0)
    assert kl_against_harm.claims([difference(1.0, 0.06)] * 3, np.zeros(3)) == (False, 0, 0)


def test_ranks_are_those_within_a_model() -> None:
    x, y = np.array([1.0, 5.0, 2.0, 2.0, 9.0]), np.array([3.0, 1.0, 4.0, 1.0, 5.0])
    alone = spearman(x, y)
    assert alone is not None and kl_against_harm.rank_correlation([(x, y)]) == pytest.approx(alone.value)
    rising = (np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0]))
    assert kl_against_harm.rank_correlation([rising, (rising[0] + 100, rising[1] - 100)]) == pytest.approx(1.0)


def test_of_pairs_told_apart_the_closer_one_may_have_more_harm() -> None:
    """KL 1, 2 and 3 on every item but for a little: all pairs are told apart. Harm is 1, 0 and 0 of 40."""
    kl = np.arange(1.0, 4.0)[:, None] + 0.01 * np.random.default_rng(0).random((3, 40))
    correct = np.ones((3, 40), dtype=bool)
    correct[0, 0] = False
    assert kl_against_harm.closer_with_more_harm(
        kl_against_harm.Measured(("a", "b", "c"), np.ones(40, dtype=bool), correct, kl)
    ) == (2, 2)


def test_simulated_variants_are_equal_where_they_should_be() -> None:
    """Exchanged values stay with their item; the mean of many samples is the one that all variants have."""
    one, rng = measured(), np.random.default_rng(0)
    found, *truths = kl_against_harm.exchanged(one, rng)
    assert not np.any(truths)
    sums = {(right, round(kl, 9)) for right, kl in zip(one.correct.sum(axis=0), one.kl.sum(axis=0), strict=True)}
    drawn = zip(found.correct.sum(axis=0), found.kl.sum(axis=0), strict=True)
    assert {(right, round(kl, 9)) for right, kl in drawn} <= sums
    samples = [kl_against_harm.own_shapes(one, rng)[0] for _ in range(400)]
    # Standard errors: 1 nat/sqrt(200 * 400) = 0.004, and sqrt(0.1/(200 * 400)) = 0.001 of harm
    assert np.mean([s.kl.mean(axis=1) for s in samples], axis=0) == pytest.approx(np.ones(4), abs=0.016)
    assert np.mean([s.harm for s in samples], axis=0) == pytest.approx(np.zeros(4), abs=0.005)
    assert np.mean([s.flips for s in samples], axis=0) == pytest.approx(one.flips, abs=0.005)
    _, kl, right = kl_against_harm.as_measured(one, rng)
    assert kl.tolist() == one.kl.mean(axis=1).tolist() and right == pytest.approx(one.baseline.mean() - one.harm)


def test_the_right_end_is_that_of_the_passage(tmp_path: Path) -> None:
    text = " ".join(str(number) for number in range(100_000))
    kl_against_harm.write_task(text, tmp_path / "task.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "task.jsonl").read_text().splitlines()]
    assert len(rows) == kl_against_harm.ITEMS and len({row["answer"] for row in rows}) == 4
    for row in rows:
        assert len(row["context"]) == kl_against_harm.BEFORE and len(set(row["choices"])) == 4
        assert {len(choice) for choice in row["choices"]} == {kl_against_harm.AFTER}
        goes_on = [f"{row['context']} {choice}" in text for choice in row["choices"]]
        assert goes_on == [index == row["answer"] for index in range(4)]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    one = measured(items=203)
    kl_against_harm.write(tmp_path / "some.npz", {"a": one, "b": one.part([1, 2])})
    again = kl_against_harm.read(tmp_path / "some.npz")
    assert list(again) == ["a", "b"] and again["b"].names == ("1", "2")
    assert (again["a"].correct == one.correct).all() and (again["a"].baseline == one.baseline).all()
    # Its root is kept in float16: half a unit in the last of 11 places, twice for the square.
    assert again["a"].kl == pytest.approx(one.kl, rel=(1 + 2.0**-11) ** 2 - 1, abs=2.0**-38)


def test_three_models_have_thirty_variants_near_their_baseline() -> None:
    stored = kl_against_harm.read(kl_against_harm.STORED)
    assert len(stored) == 3 and sum(len(one.below(kl_against_harm.NEAR).names) for one in stored.values()) >= 30
    for one in stored.values():
        assert len({*one.names}) == len(one.names)
        assert not any((a == b).all() for a, b in combinations(one.kl, 2))


FLIPS = published_gate("distance/flips_pct", 5.0)


def share(changed: int, n: int, *, upper: bool = True, level: float = 0.95) -> OneEnd:
    return OneEnd(value=changed / n, end=wilson(changed, n, level=level)[int(upper)], low=0.0, high=1.0, upper=upper)


@given(st.integers(0, 200), st.integers(1, 20), st.booleans())
def test_of_a_share_it_is_wilson_s_interval_at_the_other_level(changed: int, n_values: int, upper: bool) -> None:
    level = 1 - 2 * ERROR_RATE / n_values
    end = wilson(changed, 200, level=level)[int(upper)]
    assert share(changed, 200, upper=upper).for_all(n_values) == pytest.approx(end, abs=of_sum(64))
    if 0 < end < 1 and (apart := abs(end - changed / 200)) > 1e-9:
        # An error of the end is 1/apart times as large in z, which is below 4, and z² times that in the tail.
        rounding = 4**2 * of_sum(64) / apart
        assert share(changed, 200, upper=upper).p_value(end) == pytest.approx(ERROR_RATE / n_values, rel=rounding)


def test_the_score_test_by_hand_and_groups_count_through_their_end() -> None:
    """30 of 1,000 against 5 %: z = (0.05 - 0.03)/sqrt(0.05 * 0.95/1000) = 2.902."""
    assert share(30, 1000).p_value(0.05) == pytest.approx(float(norm.sf(0.02 / math.sqrt(0.05 * 0.95 / 1000))))
    effect = DesignEffect(effect=4.0, df=1e9, n_groups=1000)
    grouped = OneEnd(value=0.03, end=wilson(30, 1000, effect=effect).high, low=0.0, high=1.0, upper=True)
    assert grouped.p_value(0.05) == pytest.approx(float(norm.sf(0.02 / math.sqrt(0.05 * 0.95 / 250))), rel=1e-4)


def test_ends_of_a_kl_of_a_difference_and_of_equal_models_by_hand() -> None:
    kl = OneEnd(value=0.01, end=0.02, low=0.0, high=math.inf, upper=True)
    assert kl.p_value(0.02) == pytest.approx(0.025)
    assert kl.p_value(0.04) == pytest.approx(float(norm.sf(2 * norm.isf(0.025))))
    assert kl.for_all(1) == pytest.approx(0.02)
    assert kl.for_all(10) == pytest.approx(0.01 * 2 ** (norm.isf(0.0025) / norm.isf(0.025)))
    drop = OneEnd(value=0.4, end=1.4, low=-math.inf, high=math.inf, upper=True)
    assert drop.p_value(2.4) == pytest.approx(float(norm.sf(2 * norm.isf(0.025))))
    below = OneEnd(value=0.4, end=-0.6, low=-math.inf, high=math.inf, upper=False)
    assert drop.p_value(0.4) == below.p_value(0.4) == 1.0
    nothing = OneEnd(value=0.0, end=0.0, low=0.0, high=math.inf, upper=True)
    assert nothing.p_value(0.05) == nothing.p_value(0.0) == 0.0 and nothing.for_all(20) == 0.0
    # A lower end that is equal to its value, as of an agreement of 1 [1, 1], is no upper one.
    perfect = OneEnd(value=1.0, end=1.0, low=0.0, high=1.0, upper=False)
    assert perfect.p_value(0.5) == perfect.p_value(1.0) == 0.0 and perfect.for_all(20) == 1.0
    assert replace(perfect, upper=True).p_value(0.5) == 1.0 == replace(nothing, upper=False).p_value(0.05)


def variant(name: str, changed: int, n: int = 1000, **more: float) -> Candidate:
    end = 100 * wilson(changed, n).high
    metrics = {"distance/flips_pct": 100 * changed / n, "gate/flips_pct_upper": end, "size/bytes": 10.0 + changed}
    metrics["distance/kl_mean"] = 0.01
    return Candidate(name=name, run_id=name, version=None, method="rtn", metrics={**metrics, "size/ratio": 4.0, **more})


def passing(variants: list[Candidate]) -> list[str]:
    decision = decide(variants, [FLIPS])
    return sorted(outcome.candidate.name for outcome in decision.outcomes if outcome.passed)


@pytest.mark.parametrize("n_others", [0, 19])
def test_a_perfect_variant_passes_a_gate_that_wants_at_least_something(n_others: int) -> None:
    value, end = "distance/top1_agreement", "distance/top1_agreement (lower end)"
    gate = Gate(metric=end, bound=0.99, label="same token", at_least=True, value=value, low=0.0, high=1.0)
    ends = {value: 1.0, end: 1.0}
    several = [variant(f"v{number}", 0, **ends) for number in range(1 + n_others)]
    assert [outcome.passed for outcome in decide(several, [gate]).outcomes] == [True] * len(several)


def test_what_passes_alone_may_not_pass_among_twenty() -> None:
    """35 of 1,000 has p = 0.0147: enough alone, and with 1 other (Holm: 0.0147 <= 0.025), not with 20 at the limit."""
    near, far = variant("near", 35), [variant(f"far{i}", 60) for i in range(19)]
    assert near.metrics["gate/flips_pct_upper"] < 5.0
    assert passing([near]) == ["near"]
    assert passing([near, variant("clear", 5)]) == ["clear", "near"]  # the clear one is taken out first
    assert passing([near, *far]) == []
    assert passing([variant("clear", 5), near, *far]) == ["clear"]
    refused = decide([near, *far], [FLIPS]).outcomes
    reason = next(outcome.failed for outcome in refused if outcome.candidate.name == "near")
    assert len(reason) == 1 and "passes alone, not as one of 20" in reason[0] and "29.5 %" in reason[0]


def test_what_cannot_pass_does_not_count_and_an_end_at_the_limit_keeps_to_it() -> None:
    not_smaller = [variant(f"same{i}", 35, **{"size/ratio": 1.0}) for i in range(19)]
    unmeasured = [Candidate(**{**vars(variant(f"un{i}", 35)), "metrics": {"size/ratio": 4.0}}) for i in range(19)]
    assert passing([variant("near", 35), *not_smaller, *unmeasured]) == ["near"]
    assert decide([variant("near", 35), *not_smaller, *unmeasured], [FLIPS]).competing == 1
    one = variant("one", 35)
    gate = published_gate("distance/flips_pct", one.metrics["gate/flips_pct_upper"])
    assert decide([one], [gate]).champion == one


def test_a_result_near_its_limit_is_called_narrow_and_the_winner_s_ends_hold_for_all() -> None:
    """Of 35 in 1,000 the upper end is 4.825, 1.325 from the value: narrow within 0.265 of a limit."""
    for limit, narrow in ((5.2, False), (5.0, True), (4.6, True), (4.5, False)):
        [check] = published_gate("distance/flips_pct", limit).checks(variant("one", 35).metrics)
        assert check.reason.endswith(", narrowly") == narrow
    said = ends_for_all(decide([variant(f"v{i}", i) for i in range(10)], [FLIPS]), [FLIPS])
    end = 100 * wilson(0, 1000, level=1 - 0.05 / 10).high
    assert said == f"Chosen among 10, with 95 % for all of them at once: flips in % at most {end:.4g}."
    assert ends_for_all(decide([variant("v", 1)], [FLIPS]), [FLIPS]) == ""


def test_an_end_without_its_value_does_not_pass() -> None:
    [check] = FLIPS.checks({"gate/flips_pct_upper": 1.0})
    assert (
        not check.passed and check.missing == "distance/flips_pct" and "distance/flips_pct is missing" in check.reason
    )
    values = {"distance/kl_clipped_mean": 0.01, "distance/kl_above_clip_pct": 0.0, "distance/js_mean": 0.1}
    ends = {"gate/kl_clipped_upper": 0.02, "gate/kl_above_clip_pct_upper": 0.5}
    assert on_main_run({**values, **ends}).keys() == {*values, *ends} - {"distance/js_mean"}
    assert on_main_run(values) == {}
