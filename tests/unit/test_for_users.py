"""The sentence "For users": what surely changed comes first, corrected over all that was measured."""

import math

import pytest
from scipy.stats import norm

from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.headline import for_users, note_markdown


def result(name: str, value: float, low: float | None, high: float | None) -> MetricResult:
    return MetricResult(name=name, value=value, low=low, high=high, n=100)


def sentence(*results: MetricResult) -> str:
    return for_users({one.name: one for one in results})


LONGER = result("judge/length_ratio", 1.2, 1.1, 1.3)
DEFECTS = result("judge/defects_delta_pct", 0.4, -0.7, 1.5)


def test_what_surely_changed_comes_before_what_did_not() -> None:
    assert sentence(DEFECTS, LONGER) == (
        "For users: length of answers 1.20 [1.10, 1.30]; no sure change in answers with a defect (2 tests, Holm)."
    )
    fewer = result("tools/right_delta_pct", -1.8, -3.1, -0.7)
    assert sentence(fewer) == "For users: right calls -1.8 pt [-3.1, -0.7] (1 test)."
    assert "For users: length of answers" in note_markdown("v", {LONGER.name: LONGER})


def test_nothing_sure() -> None:
    assert sentence(DEFECTS) == "For users: no sure change in answers with a defect (1 test)."
    assert sentence() == sentence(result("judge/length_ratio", 1.2, None, None)) == ""
    same = result("judge/length_ratio", 1.0, 1.0, 1.0)  # the bootstrap of equal answers has no width
    assert sentence(same) == "For users: no sure change in length of answers (1 test)."


@pytest.mark.parametrize("z", [2.0, 2.2, 2.3])
def test_many_tests_need_stronger_evidence(z: float) -> None:
    """A ratio's error is that of its logarithm. At z it is sure alone from 1.96 on, and beside another from 2.24 on."""
    value, low, high = (math.exp(0.05 * (z + add)) for add in (0.0, -1.959964, 1.959964))
    moved = result("judge/length_ratio", value, low, high)
    assert "no sure change" not in sentence(moved)
    assert (2 * norm.sf(z) * 2 < 0.05) == ("length of answers 1.1" in sentence(moved, DEFECTS))
