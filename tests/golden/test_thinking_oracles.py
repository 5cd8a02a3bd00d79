"""Problems that a model thinks about: what lighteval, math-verify and a reader say of the same answers."""

import json
import re
from collections import Counter

import pytest

from mlflow_compress.metrics.thinking import pass_at_k
from mlflow_compress.reasoning import agree, conclusions, parted, read_answer, read_gold
from tests.shared_data import PUBLISHED

# Which of n drawn answers are right, k, and what `PassAtK.pass_at_k` of lighteval 0.13.0 gave for them.
LIGHTEVAL = [
    ("0100", 1, 0.25),
    ("0100", 2, 0.5),
    ("00100100", 1, 0.25),
    ("00010001", 4, 0.7857142857142857),
    ("1100100000000010", 8, 0.9615384615384616),
    ("1000000000000100", 4, 0.44999999999999996),
    ("00010010000010010000010000110100", 16, 0.9987764182424916),
    ("0000010010001000000101000000110000001000010000000000010110010101", 1, 0.2343750000000001),
    ("0101110100011000100000100100001100010000000010000000000001100001", 8, 0.9289548697675319),
    ("0000110100", 10, 1.0),
]


@pytest.mark.parametrize(("right", "k", "published"), LIGHTEVAL)
def test_pass_at_k_is_what_lighteval_computes(right: str, k: int, published: float) -> None:
    assert pass_at_k(right.count("1"), len(right), k) == pytest.approx(published)


def test_formulas_are_compared_as_math_verify_compares_them() -> None:
    pytest.importorskip("math_verify", reason="needs the extra math")
    pairs = json.loads((PUBLISHED / "math_verify.json").read_text())
    found = [agree(read_gold(gold, "math"), read_answer(answer, "math"), "math") for gold, answer, _ in pairs]
    assert len(pairs) == 40
    differing = [answer for (_, answer, published), ours in zip(pairs, found, strict=True) if ours is not published]
    # It joins boxes whatever stands between them, "no" too; here only a comma, "and" or "or" joins them.
    assert differing == [r"$$\boxed{(3, 3)} \text{ for part (a) and } \boxed{(1, 1)}$$"]


def test_the_right_answer_on_the_way_is_found_where_a_reader_finds_it() -> None:
    """200 wrong answers of demo-thinks and variants of it, read one by one: does the thought conclude the right sum?

    "reached": the digits that were added make the right sum, and another one is written down.
    """
    rows = json.loads((PUBLISHED.parent / "found_and_lost.json").read_text())
    labels = Counter(label for *_, label in rows)
    assert labels == {"concluded": 137, "reached": 9, "": 54}
    for _, question, text, label in rows:
        gold, (thought, answer) = str(sum(map(int, re.findall(r"\d+", question)))), parted("", text)
        assert read_answer(answer, "number") != gold
        assert (gold in conclusions(thought, "number")) == (label == "concluded"), text
