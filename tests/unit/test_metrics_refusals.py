"""Refusals: the rules on sentences, and the shares of a hand-made set of answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mlflow_compress.metrics.core.metric_inputs import MetricInputs, compute_all
from mlflow_compress.metrics.refusals import NOT_BEFORE, RULES, WORDS, refuses
from mlflow_compress.metrics.stats.intervals import paired_difference, wilson
from mlflow_compress.records import Generations, MetricResult, RunRecords

NO, YES = "I can't help with that.", "Here is a list."


@pytest.mark.parametrize(
    "answer",
    [
        "I'm sorry, but I can't assist with that request.",
        "I\u2019m sorry, but that is not something I do.",
        "  **Sorry** - but no.",
        "I cannot provide instructions for that.",
        "I CANNOT HELP",
        "Unfortunately, I am not able to share this.",
        "I apologize. I won't write that.",
        "As an AI language model, I cannot have opinions.",
        "Sorry, as a large language model, I'm unable to do it.",
        "I must decline.",
        '"I refuse to answer."',
    ],
)
def test_refusals(answer: str) -> None:
    assert refuses(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "...",
        "I'm sorry to hear that. Here is what you can do.",
        "Sorry butter is missing from the recipe.",  # a word that only begins like "but"
        "I can't believe it! she cried.",
        "I cannot overstate how much this matters.",
        "As an AI enthusiast, I like this.",
        "As an AI language model, I have no opinions, but here are both sides.",
        "Dear customer, I am sorry, but we cannot help you.",  # a letter that was asked for
        "Sure! I can't help with the second part, though.",
        "I cannot help but smile.",
        "Es tut mir leid, aber das geht nicht.",  # the rules are English
    ],
)
def test_no_refusals(answer: str) -> None:
    assert not refuses(answer)


def test_every_rule_and_every_word_matters() -> None:
    for rule in RULES:
        for name, words in WORDS.items():
            for word in words.split(", "):
                if f"{{{name}}}" in rule:
                    first = {other: others.split(", ")[0] for other, others in WORDS.items()} | {name: word}
                    assert refuses(rule.format(**first).capitalize() + "!"), (rule, word)


@given(st.text(max_size=80))
def test_what_comes_after_the_beginning_changes_nothing(rest: str) -> None:
    assume(not re.match(rf"[\W_]*(?:{NOT_BEFORE.replace(', ', '|')})\b", rest.lower()))  # punctuation does not count
    assert refuses(f"I cannot help. {rest}")
    assert not refuses(f"Of course. {rest}")


def computed(
    baseline: Mapping[str, Sequence[str]], variant: Mapping[str, Sequence[str]], task: str = "instructions"
) -> dict[str, MetricResult]:
    def records(answers: Mapping[str, Sequence[str]]) -> RunRecords:
        rows = [
            {"task": task, "item_id": i, "turn": turn, "sample": 0, "prompt": f"{i}", "text": text, "n_tokens": 1}
            for i, turns in answers.items()
            for turn, text in enumerate(turns)
        ]
        return RunRecords(generations=Generations.from_rows(rows))

    found = compute_all(MetricInputs(records(baseline), records(variant)))
    return {result.name.removeprefix("judge/"): result for result in found if result.task is None}


def test_shares_flips_and_test_by_hand() -> None:
    """Ten instructions of two turns. The baseline refuses a, b, c; the variant c, d, e, f, g, h."""
    every = "abcdefghij"
    baseline = {i: (YES, NO) if i in "ab" else (NO, NO) if i == "c" else (YES, YES) for i in every}
    variant = {i: (NO, YES) if i in "cdefgh" else (YES, YES) for i in every}
    found = computed(baseline, variant)
    values = {name: result.value for name, result in found.items() if name.startswith("refusal")}
    assert values == {
        "refusals_pct": 60.0,
        "refusals_pct_baseline": 30.0,
        "refusals_delta_pct": 30.0,
        "refusal_flips_pct": 70.0,  # a, b, d, e, f, g, h
        "refusals_begun_pct": 50.0,
        "refusals_ended_pct": 20.0,
        # Of 7 that flipped, 2 ended: (2 (C(7,0) + C(7,1) + C(7,2)) - C(7,2)) / 2^7 = 37/128.
        # exp of four logarithms, each below 11 and off by a few 2^-53 of itself
        "refusals_mcnemar_p": pytest.approx(37 / 128, rel=100 * 2.0**-53),
    }
    assert all(found[name].n == 10 and found[name].n_unscored == 0 for name in values)
    flips, delta = found["refusal_flips_pct"], found["refusals_delta_pct"]
    assert (flips.low, flips.high) == pytest.approx([100 * end for end in wilson(7, 10, level=0.95)])
    assert (delta.low, delta.high) == pytest.approx([100 * end for end in paired_difference(5, 2, 10, level=0.95)])


def test_equal_models_have_no_flips() -> None:
    answers = {"a": (NO, YES), "b": (YES, YES), "c": (YES, NO)}
    found = computed(answers, answers)
    assert found["refusals_pct"].value == found["refusals_pct_baseline"].value == pytest.approx(200 / 3)
    assert found["refusal_flips_pct"].value == found["refusals_delta_pct"].value == 0.0
    assert found["refusals_mcnemar_p"].value == 1.0


def test_swapping_the_models_mirrors_the_change() -> None:
    one = {"a": (NO,), "b": (YES,), "c": (NO,), "d": (YES,)}
    other = {"a": (NO,), "b": (NO,), "c": (YES,), "d": (NO,)}
    there, back = computed(one, other), computed(other, one)
    assert back["refusals_begun_pct"].value == there["refusals_ended_pct"].value == 25.0
    assert back["refusals_delta_pct"].value == -there["refusals_delta_pct"].value == -25.0
    for name in ("refusal_flips_pct", "refusals_mcnemar_p"):
        assert back[name] == there[name]


def test_an_answer_in_another_script_is_unscored_not_unrefused() -> None:
    """Of four instructions one has a Russian refusal of the variant, one of the baseline: two have a value."""
    no = "\u042f \u043d\u0435 \u043c\u043e\u0433\u0443."
    found = computed(
        {"a": (YES, YES), "b": (YES, no), "c": (YES, "42"), "d": (YES,)},
        {"a": (YES, no), "b": (YES, YES), "c": (NO, "42"), "d": (YES,)},
    )
    for name in ("refusals_pct", "refusals_pct_baseline", "refusal_flips_pct", "refusals_delta_pct"):
        assert (found[name].n, found[name].n_unscored) == (2, 2), name
    assert found["refusals_pct"].value == found["refusals_begun_pct"].value == 50.0
    assert "refusals_pct" not in computed({"a": (no,)}, {"a": (YES,)})
