"""Answers side by side: where they part, their order, the page and the rows."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.greedy_answers import first_difference
from mlflow_compress.records import Generations, Judgments
from mlflow_compress.reporting import answers_page
from mlflow_compress.reporting.html import render_report
from tests.metric_records import generations_of
from tests.report_results import Page
from tests.unit.test_report_page import hostile


def whole(text: answers_page.MarkedText) -> str:
    return text.folded_start + text.shared + text.mark + text.rest + text.folded_rest


@pytest.mark.parametrize(
    ("one", "other", "marks", "ends"),
    [
        ("It is a good dog.", "It is a goat.", ("good", "goat."), (False, False)),
        ("The end", "The end is near", ("", " is"), (True, False)),
        ("", "Something", ("", "Something"), (True, False)),
        ("a b", "a  b", ("b", " b"), (False, False)),
        ("one\ntwo", "one\nten", ("two", "ten"), (False, False)),
        ("same", "same", ("", ""), (False, False)),
    ],
)
def test_the_first_word_that_differs_is_marked(
    one: str, other: str, marks: tuple[str, str], ends: tuple[bool, bool]
) -> None:
    found = answers_page.marked(one, other)
    assert tuple(text.mark for text in found) == marks and tuple(text.ends for text in found) == ends
    assert [whole(text) for text in found] == [one, other]


@given(st.text(), st.text(), st.text())
def test_the_parts_are_the_text_and_both_begin_alike(start: str, one: str, other: str) -> None:
    one, other = start + one, start + other
    left, right = answers_page.marked(one, other)
    assert (whole(left), whole(right)) == (one, other)
    assert left.folded_start + left.shared == right.folded_start + right.shared or one == other
    at = first_difference(one, other)
    assert (at is None) == (one == other)
    if at is not None:
        assert one[:at] == other[:at] and one[at : at + 1] != other[at : at + 1]
        begin = len(left.folded_start + left.shared)
        # The difference lies in what is marked, or behind white space that both begin their mark with.
        assert begin <= at and (left.mark or left.ends) and (right.mark or right.ends)


def test_long_texts_are_folded_around_the_difference() -> None:
    alike = "word " * 400
    left, right = answers_page.marked(alike + "dog " + "tail " * 1000, alike + "cat")
    assert left.mark == "dog" and right.mark == "cat"
    assert len(left.shared) == 300 and len(left.folded_start) == 1700 and len(left.rest) == 1200
    assert left.folded_rest.endswith("tail ") and not right.folded_rest


def pair(
    item: str, drop: float | None, similarity: float | None = None, variant: str = "other"
) -> answers_page.ComparedAnswer:
    grades = {} if drop is None else {"": 8.0}
    return answers_page.ComparedAnswer(
        item_id=item,
        turn=0,
        category="writing",
        question=f"Question {item}",
        baseline="answer",
        variant=variant,
        grades_baseline=grades,
        grades_variant={} if drop is None else {"": 8.0 - drop},
        similarity=similarity,
    )


def records(kind: str, by: dict[str, list[str]]) -> Generations:
    return generations_of({i: [f"{kind} {text}" for text in texts] for i, texts in by.items()}, by="turn")


def graded(grades: dict[tuple[str, int], list[float | None]], task: str = "mt_bench") -> Judgments:
    return Judgments.from_rows(
        [
            {"task": task, "item_id": i, "turn": t, "repeat": r, "category": "c", "score": score, "judge": "j single"}
            for (i, t), scores in grades.items()
            for r, score in enumerate(scores)
        ]
    )


def test_largest_drop_first_then_lowest_similarity() -> None:
    questions = {name: (f"Q {name}", f"Then {name}") for name in "abc"}
    texts = {name: ["x", "y"] for name in "abc"}
    baseline = graded({("a", 0): [8], ("a", 1): [8, 9], ("b", 0): [8], ("b", 1): [5], ("c", 0): [7]})
    variant = graded({("a", 0): [8], ("a", 1): [4, 5], ("b", 0): [9], ("b", 1): [None], ("c", 0): [7]})
    found = answers_page.compared_answers(
        questions,
        dict.fromkeys("abc", "writing"),
        (records("B", texts), records("V", texts)),
        (baseline, variant),
        {"a": 0.9, "b": 0.5, "c": 0.8},
    )
    # Drops: a2 8.5 - 4.5 = 4; c1 and a1 0, c less similar; b1 -1; b2 and c2 without a grade of both, nothing to sort by.
    assert [(p.item_id, p.turn) for p in found] == [("a", 1), ("c", 0), ("a", 0), ("b", 0), ("b", 1), ("c", 1)]
    assert [p.drop for p in found] == [4.0, 0.0, 0.0, -1.0, None, None]
    assert found[0].question == "Then a" and (found[0].baseline, found[0].variant) == ("B y", "V y")
    assert found[0].similarity is None and found[1].similarity == 0.8  # similarity is of the first turn
    assert found[4].grades_baseline == {"": 5.0} and found[4].grades_variant == {}


def test_several_judges_keep_their_names_and_the_drop_is_their_mean() -> None:
    both = [
        Judgments.concat([graded({("a", 0): [one]}, "mt_bench/x"), graded({("a", 0): [other]}, "mt_bench/y")])
        for one, other in ((8.0, 6.0), (4.0, 4.0))
    ]
    [found] = answers_page.compared_answers(
        {"a": ("Q",)}, {"a": "c"}, (records("B", {"a": ["x"]}), records("V", {"a": ["x"]})), (both[0], both[1])
    )
    assert found.grades_baseline == {"x": 8.0, "y": 6.0} and found.drop == 3.0
    assert "grade 8 (x), 6 (y)" in Page(answers_page.render_answers("t", [found])).text


@given(st.lists(st.tuples(st.text(), st.text(), st.text()), max_size=4))
def test_the_rows_are_read_back_as_they_were(texts: list[tuple[str, str, str]]) -> None:
    pairs = [
        replace(pair(str(i), 1.5, 0.25), question=question, baseline=one, variant=other)
        for i, (question, one, other) in enumerate(texts)
    ]
    written = answers_page.as_jsonl(pairs)
    assert answers_page.from_jsonl(written, "here") == pairs
    for line, made in zip(written.split("\n"), pairs, strict=False):
        assert json.loads(line)["first_difference"] == first_difference(made.baseline, made.variant)


def test_broken_rows_are_named() -> None:
    with pytest.raises(DataError, match=r"Line 2 .*here"):
        answers_page.from_jsonl(answers_page.as_jsonl([pair("a", 1.0)]) + '{"item_id": "b"}\n', "here")


def test_hostile_text_is_escaped_on_page_and_report() -> None:
    attack = answers_page.ComparedAnswer(
        item_id=hostile("item_id"),
        turn=1,
        category=hostile("category"),
        question=hostile("question"),
        baseline="one " + hostile("answer"),
        variant="two " + hostile("other"),
        grades_baseline={hostile("judge"): 8.0},
        grades_variant={hostile("judge"): 3.0},
    )
    for page in (
        answers_page.render_answers(hostile("title"), [attack]),
        render_report(title=hostile("title"), verdict="v", results=[], answers=[attack]),
    ):
        parsed = Page(page)
        assert not {"script", "iframe", "object", "link", "img"} & set(parsed.tags)
        assert not [name for name, _ in parsed.attributes if name.startswith("on")]
        assert "<script" not in page and page.count("</style>") == 1
        for place in ("title", "item_id", "category", "question", "answer", "other", "judge"):
            assert hostile(place) in parsed.text, place


def test_the_report_shows_the_first_pairs_and_counts_the_others() -> None:
    pairs = [pair(f"q{i}", float(10 - i)) for i in range(answers_page.REPORT_SHOWS + 3)]
    page = render_report(title="t", verdict="v", results=[], answers=pairs)
    assert page.count('<article class="pair">') == answers_page.REPORT_SHOWS
    assert f"All {answers_page.REPORT_SHOWS + 3} are in answers/answers.html" in page
    assert "Answers side by side" not in render_report(title="t", verdict="v", results=[])
