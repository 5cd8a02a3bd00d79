"""Ratings out of text, and the prompts that ask for them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_compress.judges.parsing import parse_rating
from mlflow_compress.judges.prompts import grading_prompt
from tests.shared_data import SHARED, needs_shared


@pytest.mark.parametrize(
    ("text", "rating"),
    [
        ("Rating: [[5]]", 5.0),
        ("Rating: [[ 8 ]]", 8.0),
        ("[[10/10]]", 10.0),
        ("[[ 7 / 10 ]]", 7.0),
        ("[[7.5]]", 7.5),
        ("[[8.]]", 8.0),
        ("As the format [[rating]] asks: [[6]]", 6.0),
        ("[[3]] for turn 1, [[9]] for turn 2", 3.0),
        ("According to [1], it is right.", None),
        ("Rating: 7", None),
        ("[[0]]", None),
        ("[[11]]", None),
        ("[[0]] or perhaps [[4]]", None),
        ("[[-3]]", None),
        ("[[8/9]]", None),
        ("[[[5]]]", None),
        ("[[5]", None),
        ("[[five]]", None),
        ("[[\u0665]]", None),
        ("", None),
    ],
)
def test_ratings(text: str, rating: float | None) -> None:
    assert parse_rating(text) == rating


@given(st.text())
def test_a_rating_is_in_range_or_none(text: str) -> None:
    rating = parse_rating(text)
    assert rating is None or 1.0 <= rating <= 10.0


@given(
    before=st.text(st.characters(exclude_characters="[]")),
    tenths=st.integers(10, 100),
    after=st.text(),
    space=st.sampled_from(["", " ", "\n"]),
)
def test_the_first_rating_is_read_in_any_surroundings(before: str, tenths: int, after: str, space: str) -> None:
    text = f"{before}[[{space}{tenths / 10}{space}]]{'.' + after}"
    assert parse_rating(text) == tenths / 10


@given(st.text(st.characters(exclude_characters="[")), st.integers(0, 99))
def test_a_citation_is_no_rating(text: str, number: int) -> None:
    assert parse_rating(f"{text} [{number}] {text}") is None


QUESTIONS = ("What is {2 + 2}?", "And 3?")
ANSWERS = ("Four.", "{0} seven")
REFERENCE = ("4", "7")


def test_the_first_turn_does_not_show_the_second() -> None:
    prompt = grading_prompt("writing", 0, QUESTIONS, ANSWERS)
    assert QUESTIONS[0] in prompt.user
    assert ANSWERS[0] in prompt.user
    assert QUESTIONS[1] not in prompt.user + prompt.system
    assert ANSWERS[1] not in prompt.user + prompt.system


@needs_shared
@pytest.mark.parametrize("category", ["writing", "math"])
@pytest.mark.parametrize("turn", [0, 1])
def test_prompts_equal_the_published_ones(category: str, turn: int) -> None:
    published = {
        row["name"]: row
        for row in map(json.loads, (SHARED / "data" / "mt_bench" / "judge_prompts.jsonl").read_text().splitlines())
    }
    prompt = grading_prompt(category, turn, QUESTIONS, ANSWERS, REFERENCE)
    theirs = published[prompt.name]
    values = {"question": QUESTIONS[0], "answer": ANSWERS[0]}
    for t in (0, 1):
        values |= {
            f"question_{t + 1}": QUESTIONS[t],
            f"answer_{t + 1}": ANSWERS[t],
            f"ref_answer_{t + 1}": REFERENCE[t],
        }
    assert prompt.user == theirs["prompt_template"].format(**values)
    assert prompt.system == theirs["system_prompt"]
    assert ("math" in prompt.name) == (category == "math")
    assert ("multi-turn" in prompt.name) == (turn == 1)
