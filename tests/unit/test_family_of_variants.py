"""Gates over a family of variants: p-values from one end of an interval, Holm's rule, ends that hold for all."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from mlflow_compress.decide.gates import published_gate
from mlflow_compress.decide.promotion import Candidate, decide, ends_for_all
from mlflow_compress.metrics.stats.intervals import DesignEffect, wilson
from mlflow_compress.metrics.stats.significance import ERROR, OneEnd
from mlflow_compress.tracking.run_names import on_main_run

FLIPS = published_gate("distance/flips_pct", 5.0)


def share(changed: int, n: int, *, upper: bool = True, level: float = 0.95) -> OneEnd:
    return OneEnd(value=changed / n, end=wilson(changed, n, level=level)[int(upper)], low=0.0, high=1.0)


@given(st.integers(0, 200), st.integers(1, 20), st.booleans())
def test_of_a_share_it_is_wilson_s_interval_at_the_other_level(changed: int, n_values: int, upper: bool) -> None:
    level = 1 - 2 * ERROR / n_values
    end = wilson(changed, 200, level=level)[int(upper)]
    assert share(changed, 200, upper=upper).for_all(n_values) == pytest.approx(end, abs=1e-9)
    if 0 < end < 1 and abs(end - changed / 200) > 1e-9:
        assert share(changed, 200, upper=upper).p_value(end) == pytest.approx(ERROR / n_values, rel=1e-6)


def test_the_score_test_by_hand() -> None:
    """30 of 1,000 against 5 %: z = (0.05 - 0.03)/sqrt(0.05 * 0.95/1000) = 2.902."""
    assert share(30, 1000).p_value(0.05) == pytest.approx(float(norm.sf(0.02 / math.sqrt(0.05 * 0.95 / 1000))))


def test_of_a_kl_it_is_normal_on_the_logarithm() -> None:
    kl = OneEnd(value=0.01, end=0.02, low=0.0, high=math.inf)
    assert kl.p_value(0.02) == pytest.approx(0.025)
    assert kl.p_value(0.04) == pytest.approx(float(norm.sf(2 * norm.isf(0.025))))
    assert kl.for_all(1) == pytest.approx(0.02)
    assert kl.for_all(10) == pytest.approx(0.01 * 2 ** (norm.isf(0.0025) / norm.isf(0.025)))


def test_a_difference_may_have_either_sign() -> None:
    drop = OneEnd(value=0.4, end=1.4, low=-math.inf, high=math.inf)
    assert drop.p_value(2.4) == pytest.approx(float(norm.sf(2 * norm.isf(0.025))))
    assert drop.p_value(0.4) == 1.0


def test_equal_models_have_no_error() -> None:
    nothing = OneEnd(value=0.0, end=0.0, low=0.0, high=math.inf)
    assert nothing.p_value(0.05) == nothing.p_value(0.0) == 0.0 and nothing.for_all(20) == 0.0


def test_groups_count_through_their_end() -> None:
    effect = DesignEffect(effect=4.0, df=1e9, n_groups=1000)
    grouped = OneEnd(value=0.03, end=wilson(30, 1000, effect=effect).high, low=0.0, high=1.0)
    assert grouped.p_value(0.05) == pytest.approx(float(norm.sf(0.02 / math.sqrt(0.05 * 0.95 / 250))), rel=1e-4)


def variant(name: str, changed: int, n: int = 1000, **more: float) -> Candidate:
    end = 100 * wilson(changed, n).high
    metrics = {"distance/flips_pct": 100 * changed / n, "gate/flips_pct_upper": end, "size/bytes": 10.0 + changed}
    metrics["distance/kl_mean"] = 0.01
    return Candidate(name=name, run_id=name, version=None, method="rtn", metrics={**metrics, "size/ratio": 4.0, **more})


def passing(variants: list[Candidate]) -> list[str]:
    decision = decide(variants, [FLIPS])
    return sorted(outcome.candidate.name for outcome in decision.outcomes if outcome.passed)


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


def test_what_cannot_pass_does_not_count() -> None:
    not_smaller = [variant(f"same{i}", 35, **{"size/ratio": 1.0}) for i in range(19)]
    unmeasured = [Candidate(**{**vars(variant(f"un{i}", 35)), "metrics": {"size/ratio": 4.0}}) for i in range(19)]
    assert passing([variant("near", 35), *not_smaller, *unmeasured]) == ["near"]
    assert decide([variant("near", 35), *not_smaller, *unmeasured], [FLIPS]).competing == 1


def test_an_end_at_the_limit_keeps_to_it() -> None:
    one = variant("one", 35)
    gate = published_gate("distance/flips_pct", one.metrics["gate/flips_pct_upper"])
    assert decide([one], [gate]).champion == one


def test_a_result_near_its_limit_is_called_narrow() -> None:
    """Of 35 in 1,000 the upper end is 4.825, 1.325 from the value: narrow within 0.265 of a limit."""
    for limit, narrow in ((5.2, False), (5.0, True), (4.6, True), (4.5, False)):
        [check] = published_gate("distance/flips_pct", limit).checks(variant("one", 35).metrics)
        assert check.reason.endswith(", narrowly") == narrow


def test_the_winner_s_ends_hold_for_all() -> None:
    decision = decide([variant(f"v{i}", i) for i in range(10)], [FLIPS])
    said = ends_for_all(decision, [FLIPS])
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
