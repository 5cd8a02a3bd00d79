"""The gate item by item: which policies it takes, whose values it reads, and its error level."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.thinking_coverage import gates
from mlflow_compress.config.policy import AnomalyRule, MarginGate, MetricGate, Policy, Requirements
from mlflow_compress.decide.item_checks import THOUGHTS, VALUES, check_places, item_checks, item_policy
from mlflow_compress.errors import ConfigError, DataError, UnsupportedError
from mlflow_compress.metrics import compute_all
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, MetricSettings
from mlflow_compress.metrics.core.metric_registry import METRICS, key
from mlflow_compress.metrics.stats.sequential import BoundedCheck, decide_checks, p_values, random_order, verdicts
from tests.metric_records import inputs
from tests.roundoff import of_sum
from tests.unit.test_metrics_thinking import CUT, LIMIT, UNREAD, said
from tests.unit.test_metrics_thinking import inputs as thinking_inputs

FULL = inputs(60)


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, str | None, str | None], float]:
    measured = MetricInputs(FULL.baseline, FULL.variant, settings=MetricSettings(resamples=100))
    return {(r.name, r.task, r.category): r.value for r in compute_all(measured)}


@pytest.mark.parametrize("metric", sorted(VALUES.keys() - THOUGHTS.keys()))
@pytest.mark.parametrize(("task", "category"), [(None, None), ("mmlu", None), ("mmlu", "law")])
def test_the_mean_of_the_items_is_the_metric(
    metric: str, task: str | None, category: str | None, results: dict[tuple[str, str | None, str | None], float]
) -> None:
    """The values that the gate looks at have the mean that the whole evaluation reports, in the metric's unit."""
    side = "at_least" if key(metric).direction == "higher" else "at_most"
    limit = {side: 0.0 if metric == "quality/accuracy_delta" else 0.5}
    policy = Policy(kl=None, margins=(), gates=(MetricGate(metric=metric, task=task, category=category, **limit),))
    [check] = item_policy(policy).checks
    values = VALUES[metric].of(FULL)[check.rows(FULL.view, FULL.headline_families)]
    values = values[np.isfinite(values)]
    if (metric, task, category) not in results:  # the metric is not reported by category
        assert category is not None and len(values)
        return
    assert VALUES[metric].factor * values.mean() == pytest.approx(results[metric, task, category])
    assert VALUES[metric].low <= values.min() and values.max() <= VALUES[metric].high


@pytest.mark.parametrize("metric", sorted(THOUGHTS))
@pytest.mark.parametrize("limit", [0.25, 0.75])
def test_problems_with_several_answers_have_the_metric_s_value_and_keep_to_a_limit_where_it_does(
    metric: str, limit: float
) -> None:
    """Some answers are wrong, cut, cannot be read, or were found on the way; they have different lengths."""
    kinds = [said(1), said(1, 5, tokens=30), said(5, tokens=7), said(2, tokens=2), CUT, UNREAD]
    rng = np.random.default_rng(9)
    models = [[[kinds[place] for place in rng.integers(len(kinds), size=4)] for _ in range(12)] for _ in range(3)]
    models[2][0] = [UNREAD] * 4
    asked = thinking_inputs(models, ["1"] * 11 + ["2"])
    measured = {r.name: r for name in ("thinking", "thought_length") for r in METRICS.get(name).compute(asked)}
    of, factor = measured[metric].value, VALUES[metric].factor
    gate = MetricGate(metric=metric, at_most=limit * factor)
    [check] = (one.within(asked.view) for one in item_checks(Policy(kl=None, margins=(), gates=(gate,))))
    values, *parts = check.values(asked)
    there = np.isfinite(values)
    total, divisor = (float(part[there].sum()) for part in parts)
    assert factor * total / divisor == pytest.approx(of)
    assert (values[there].mean() <= check.claim.limit) == (of <= limit * factor)
    assert check.claim.low <= values[there].min() and values[there].max() <= check.claim.high
    assert check.claim.high == LIMIT if metric == "reasoning/length_ratio" else check.claim.high <= 1.0


def test_a_gate_on_problems_is_about_no_other_items() -> None:
    policy = Policy(kl=None, margins=(), gates=(MetricGate(metric="reasoning/cut_pct", at_most=5),))
    [check] = item_checks(policy)
    assert not len(check.rows(FULL.view, FULL.headline_families)) and np.isnan(check.values(FULL)[0]).all()


def test_the_error_holds_for_problems_with_several_answers() -> None:
    """Four checks exactly at their limits, looked at after every 20 questions: at most 4.5 % of gates pass one.

    Three standard errors of 120 gates are 5.7 %; of fails, at 0.5 %, 1.9 %. A loss of 15 points fails early.
    """
    passes, fails, _ = gates(200, 8, 0.1, 120)
    assert passes <= 4.5 + 5.7 and fails <= 0.5 + 1.9
    _, found, used = gates(200, 8, 0.3, 60, limits_of=0.04)
    assert found > 80.0 and used < 150


def test_the_default_policy_is_four_checks_of_three_gates() -> None:
    found = item_policy(Policy())
    claims = {c.metric: (c.gate, c.claim.limit, c.claim.at_least) for c in found.checks}
    assert claims == {
        "distance/kl_clipped_mean": (0, 0.05, False),
        "distance/kl_above_clip_pct": (0, 0.01, False),
        "distance/flips_pct": (1, 0.05, False),
        "quality/accuracy_delta": (2, -0.02, True),
    }
    assert len(found.gates) == 3


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Policy(gates=(MetricGate(metric="distance/kl_mean", at_most=1),)), "KL has no upper bound"),
        (Policy(gates=(MetricGate(metric="perplexity/corpus", at_most=9),)), "Unknown metric key"),
        (Policy(gates=(MetricGate(metric="quality/perplexity", at_most=9),)), "no mean of one bounded value per item"),
        (Policy(gates=(MetricGate(metric="distance/flips_pct", at_most=5, bound="value"),)), "worse end"),
        (Policy(gates=(MetricGate(metric="distance/flips_pct", at_most=0),)), "strictly between"),
        (Policy(gates=(MetricGate(metric="judge/mt_bench", at_least=5),)), "calls no judge model"),
        (Policy(require=Requirements(stages=("judge",))), "a stage that the gate does not run"),
        (Policy(anomalies=AnomalyRule(max_accuracy_gain=0.1)), "not decided item by item"),
    ],
)
def test_what_items_cannot_decide_is_refused_with_the_reason(policy: Policy, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        item_policy(policy)


def test_size_speed_and_memory_need_no_item() -> None:
    gates = tuple(
        MetricGate(metric=metric, at_most=50)
        for metric in ("size/bytes", "speed/memory_peak_ratio", "distance/flips_pct", "speed/token_gap_ms_p50")
    )
    margins = (MarginGate(metric="speed/decode_ratio_batch_1", margin=0.1),)
    found = item_policy(Policy(kl=None, gates=gates, margins=margins))
    assert found.at_once == {0, 1, 3, 4} and [check.gate for check in found.checks] == [2]
    assert found.gates[4].bound == pytest.approx(0.9)  # type: ignore[union-attr]


def test_a_gate_about_no_item_is_refused_and_a_margin_reads_as_in_a_promotion() -> None:
    policy = Policy(gates=(MetricGate(metric="distance/flips_pct", at_most=5, task="mmmlu"),))
    with pytest.raises(ConfigError, match="has no items"):
        check_places(item_policy(policy).checks, FULL.view, FULL.headline_families)
    policy = Policy(kl=None, gates=(), margins=(MarginGate(metric="distance/top1_agreement", margin=0.1),))
    [check] = item_policy(policy).checks
    assert check.claim.at_least and check.claim.limit == pytest.approx(0.9)
    with pytest.raises(UnsupportedError):
        item_policy(Policy(margins=(MarginGate(metric="distance/kl_reverse_mean", margin=0.1),)))


# --- several checks together


FLIPS = BoundedCheck(name="flips", limit=0.05)


def test_zeros_pass_after_as_many_items_as_the_arithmetic_says() -> None:
    """One check, error 5 %: passes have 4.5 %, so that the capital must reach 22.2.

    The bold bettor has 0.95 of it. He stakes between 0.9 and 0.99 of 1/0.95, so that it grows by 1.0474 to 1.0521 an item:
    0.95 x 1.0521^n >= 22.2 takes 63 items, and 0.95 x 1.0474^n 69. The careful one takes off an item at most.
    """
    n = next(n for n in range(1, 100) if decide_checks([FLIPS], {"flips": [0.0] * n})["flips"] == "pass")
    assert 62 <= n <= 69
    assert decide_checks([FLIPS], {"flips": [0.0] * (n - 1)})["flips"] == "undecided"


def test_a_lower_limit_is_the_mirror_of_an_upper_one() -> None:
    x = (np.random.default_rng(0).random(300) < 0.2).astype(float)
    up, down = BoundedCheck(name="a", limit=0.3), BoundedCheck(name="a", limit=0.7, at_least=True)
    for path, mirrored in zip(
        p_values(up, x, error=0.05, n_checks=1), p_values(down, 1 - x, error=0.05, n_checks=1), strict=True
    ):
        np.testing.assert_allclose(path, mirrored, rtol=of_sum(16 * 300))  # 300 factors
    assert decide_checks([up], {"a": x}) == decide_checks([down], {"a": 1 - x}) == {"a": "pass"}
    scaled = BoundedCheck(name="a", limit=-0.4, low=-1.0, high=1.0)  # 2 x 0.3 - 1
    assert decide_checks([scaled], {"a": 2 * x - 1}) == {"a": "pass"}


def test_p_values_never_rise_and_look_at_the_past_only() -> None:
    x = (np.random.default_rng(3).random(400) < 0.04).astype(float)
    whole = p_values(FLIPS, x, error=0.05, n_checks=2)
    for path in whole:
        assert (np.diff(path) <= 0).all() and (path > 0).all() and (path <= 1).all()
    for n in (1, 10, 399):
        for path, early in zip(whole, p_values(FLIPS, x[:n], error=0.05, n_checks=2), strict=True):
            np.testing.assert_array_equal(path[:n], early)


def test_passes_are_corrected_by_holm_fails_by_bonferroni_and_values_and_levels_are_checked() -> None:
    """Error 5 %: passes have 4.5 %, fails 0.5 %. Two checks: the smaller p must be at most 2.25 %, the other then 4.5 %."""
    assert verdicts([0.022, 0.044], [1, 1], error=0.05) == ["pass", "pass"]
    assert verdicts([0.023, 0.044], [1, 1], error=0.05) == ["undecided", "undecided"]
    assert verdicts([0.022, 0.046], [1, 1], error=0.05) == ["pass", "undecided"]
    assert verdicts([1, 1], [0.0024, 0.0026], error=0.05) == ["fail", "undecided"]
    assert verdicts([0.001, 1], [0.001, 1], error=0.05) == ["undecided", "undecided"]
    with pytest.raises(DataError, match="must lie in"):
        decide_checks([FLIPS], {"flips": [2.0]})
    with pytest.raises(ConfigError, match="error level"):
        decide_checks([FLIPS], {"flips": [0.0]}, error=0.0)
    assert decide_checks([], {}) == {} and decide_checks([FLIPS], {"flips": []}) == {"flips": "undecided"}


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6), st.sampled_from([0.05, 0.3, 0.9]))
def test_checks_pass_by_holm_s_steps(p: list[float], error: float) -> None:
    level, steps = 0.9 * error, sorted(p)
    # A product and a quotient round differently.
    assume(all(abs(value * (len(p) - step) - level) > 1e-9 for step, value in enumerate(steps)))
    passing = next((step for step, value in enumerate(steps) if value > level / (len(p) - step)), len(p))
    found = verdicts(p, np.ones(len(p)), error=error)
    assert [value for value, verdict in sorted(zip(p, found, strict=True)) if verdict == "pass"] == steps[:passing]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_error_level_holds_at_the_limit(seed: int) -> None:
    """400 gates of three checks whose means are exactly their limits: a pass of any is wrong, in at most 4.5 % of them.

    Three standard errors of 400 runs at 4.5 % are 3.1 %; of fails, at 0.5 %, 1.1 %.
    """
    rng = np.random.default_rng(seed)
    checks = [
        FLIPS,
        BoundedCheck(name="rare", limit=0.01),
        BoundedCheck(name="accuracy", limit=-0.02, low=-1.0, at_least=True),
    ]
    passes = fails = 0
    for _ in range(400):
        draws = [
            (rng.random(800) < 0.05).astype(float),
            (rng.random(800) < 0.01).astype(float),
            rng.choice([-1.0, 0.0, 1.0], size=800, p=[0.06, 0.90, 0.04]),
        ]
        paths = [p_values(c, x, error=0.05, n_checks=3) for c, x in zip(checks, draws, strict=True)]
        found = [verdicts([w[t] for w, _ in paths], [r[t] for _, r in paths], error=0.05) for t in range(49, 800, 50)]
        passes += any("pass" in now for now in found)
        fails += any("fail" in now for now in found)
    assert passes / 400 <= 0.045 + 0.031
    assert fails / 400 <= 0.005 + 0.011


def test_the_order_of_items_is_a_random_one_of_their_ids() -> None:
    keys = [("mmlu", str(i)) for i in range(50)]
    assert sorted(random_order(keys, seed=1)) == list(range(50)) and list(random_order(keys, seed=1)) != list(range(50))
