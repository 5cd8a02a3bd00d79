"""The policy's answer is the first clause on every surface, and tells by itself whether to ship, not to, or to measure."""

import math
from dataclasses import replace

import pytest

from mlflow_compress.config.policy import Policy
from mlflow_compress.decide.champion import choice_notes
from mlflow_compress.decide.gates import Check, Gate
from mlflow_compress.decide.promotion import Candidate, decide, gate_numbers, gates_of, policy_answer
from mlflow_compress.metrics.core.account import Account
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.verdict import answer_by_default, verdict

NAMES = {
    "delta": "quality/accuracy_delta",
    "flips": "distance/flips_pct",
    "kl": "distance/kl_mean",
    "clipped": "distance/kl_clipped_mean",
    "above": "distance/kl_above_clip_pct",
    "items": "distance/kl_items",
}
GOOD = {
    "delta": (0.001, -0.009, 0.011),
    "flips": (2.0, 1.3, 3.1),
    "kl": (0.01, 0.008, 0.012),
    "clipped": (0.01, 0.008, 0.015),
    "above": (0.0, 0.0, 0.4),
    "items": 1000.0,
}
SCORED = Account(asked=1000)

# What was measured, the size ratio and the account -> the first clause
SITUATIONS: dict[str, tuple[dict[str, object], float | None, Account, str]] = {
    "passes": (GOOD, 2.0, SCORED, "passes"),
    "fails by one gate": (GOOD | {"flips": (12.2, 10.0, 14.0)}, 2.0, SCORED, "fails: flips 12.2 % > 5"),
    "fails by two": (
        GOOD | {"flips": (12.2, 10.0, 14.0), "kl": (0.2, 0.1, 0.3), "clipped": (0.15, 0.1, 0.2)},
        2.0,
        SCORED,
        "fails: KL 0.2 > 0.05; flips 12.2 % > 5",
    ),
    "open for items": (
        GOOD | {"flips": (4.4, 3.3, 5.9)},
        2.0,
        SCORED,
        # A true share above 5 % is too likely: (5 - 4.4)/0.66 = 0.9 standard errors, where 1.5 are needed
        "open: needs more than 10 times as many items for flips",
    ),
    "open for a few items": (
        GOOD | {"flips": (3.6, 2.6, 5.1)},
        2.0,
        SCORED,
        "open: needs about 3,700 more items for flips",
    ),
    "accuracy moved, on few items": (
        GOOD | {"delta": (-0.012, -0.024, 0.0)},
        2.0,
        SCORED,
        # (2 - 1.2)/0.61 = 1.3 standard errors, see `test_a_gate_is_planned_over_what_the_first_items_leave_open`
        "open: needs more than 10 times as many items for accuracy drop",
    ),
    "accuracy worse": (GOOD | {"delta": (-0.04, -0.05, -0.03)}, 2.0, SCORED, "fails: accuracy drop 4 points > 2"),
    "cut prompts": (
        GOOD,
        2.0,
        Account(asked=1000, cut=30),
        "open: 3 % of the prompts were cut to the model's context > 1 %",
    ),
    "unscored above 1 %": (
        GOOD | {"flips": (12.2, 10.0, 14.0)},
        2.0,
        Account(asked=1000, unscored={"x": 40}),
        "open: 4 % of the items have no score > 1 %",
    ),
    "mean without an interval": (
        {**GOOD, "kl": (0.02, None, None), "clipped": (0.01, 0.0, 0.02), "above": (0.5, 0.1, 1.6)},
        2.0,
        SCORED,
        "open: needs more than 10 times as many items for items above the clip limit",
    ),
    "mean without an interval that is too large": (
        {**GOOD, "kl": (0.2, None, None), "clipped": (0.09, 0.06, 0.12), "above": (0.5, 0.1, 0.9)},
        2.0,
        SCORED,
        "fails: KL 0.2 > 0.05",
    ),
    "served, without distances": (
        {"delta": GOOD["delta"], "flips": GOOD["flips"]},
        None,
        SCORED,
        "open: KL has no upper end, as a server shows it",
    ),
    "not smaller": (GOOD, 1.0, SCORED, "fails: not smaller than the baseline: the same size on disk"),
}


def results(values: dict[str, object]) -> dict[str, MetricResult]:
    found = {}
    for short, given in values.items():
        value, low, high = given if isinstance(given, tuple) else (given, None, None)
        found[NAMES[short]] = MetricResult(NAMES[short], value, low, high, n=1000)
    return found


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_first_clause_is_the_policy_s_answer(situation: str) -> None:
    values, ratio, account, clause = SITUATIONS[situation]
    pooled = results(values)
    answer = answer_by_default("v", pooled, size_ratio=ratio, account=account)
    assert answer.text() == clause
    word, _, why = clause.partition(": ")
    under = "open under" if word == "open" else word
    said = verdict("v", pooled, size_ratio=ratio, account=account)
    assert said.startswith(f"v: {under} the default policy{f': {why}' if why else ''}; ")
    # A promotion of this variant alone decides the same, and says so in the same words.
    policy = gates_of(Policy())
    numbers = {**gate_numbers(list(pooled.values()), policy.readings), **account.values()}
    sizes = {} if ratio is None else {"size/ratio": ratio, "size/bytes": 1e6 / ratio}
    candidate = Candidate(
        name="v", run_id="r", version=None, method="rtn", metrics={**numbers, **sizes}, items=1000, served=ratio is None
    )
    [outcome] = decide([candidate], policy.gates, rules=policy.rules).outcomes
    assert outcome.passed == (answer.word == "passes")
    assert outcome.answer.text().startswith(clause)


def test_a_number_of_items_that_cannot_be_told_is_not_told() -> None:
    open_gate = Check(passed=False, reason="flips: 6 > 5", is_open=True, short="flips", times_items=3.0)
    assert policy_answer([open_gate], None).text() == "open: needs more items for flips"
    endless = replace(open_gate, short="worst slice", times_items=math.inf)
    assert policy_answer([open_gate, endless], 100).text() == (
        "open: needs more than 10 times as many items for flips and worst slice"
    )


def test_a_gate_on_accuracy_as_a_share_is_told_in_its_own_unit() -> None:
    """-0.5 points [-2.2, 1.2] and a limit of -2: 1.5 is 1.73 standard errors of 1.7/1.96. With 5.8 times the items,

    ``Phi((1.73 - 1.96/sqrt(5.8)) / sqrt(1 + 1/5.8))`` is 80 %.
    """
    [gate] = gates_of(Policy(kl=None, margins=(), gates=({"metric": NAMES["delta"], "at_least": -0.02},))).gates
    assert isinstance(gate, Gate)
    numbers = {gate.metric: -0.022, gate.value: -0.005, NAMES["flips"]: 3.0}
    assert policy_answer(gate.checks(numbers), 1000).text().startswith("open: needs about 4,800 more items for ")


def test_the_closest_of_those_of_about_one_size_is_chosen_and_a_closer_larger_one_is_named() -> None:
    def variant(name: str, size: float, kl: float) -> Candidate:
        pooled = results({**GOOD, "kl": (kl, kl / 2, 2 * kl)})
        numbers = {**gate_numbers(list(pooled.values()), ()), **SCORED.values()}
        sizes = {"size/ratio": 10.0 / size, "size/bytes": size}
        return Candidate(name=name, run_id=name, version=None, method="rtn", metrics={**numbers, **sizes}, items=1000)

    found = [variant("smallest", 1.0, 0.014), variant("closer", 1.005, 0.009), variant("closest", 1.5, 0.001)]
    policy = gates_of(Policy())
    decision = decide(found, policy.gates)
    assert [outcome.candidate.name for outcome in decision.outcomes] == ["closer", "smallest", "closest"]
    notes = " ".join(choice_notes(decision, None, policy.gates))
    assert "Not closest, which is closer (KL 0.001, not 0.009): 49.3 % larger." in notes and "smallest" not in notes
