"""Health of answers: each defect on texts, planted loops against ordinary texts, and shares derived by hand."""

import ast
import random
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_compress import demo
from mlflow_compress.config.policy import MarginGate, MetricGate, Policy
from mlflow_compress.decide.promotion import gates_of, read_gates
from mlflow_compress.errors import AlignmentError
from mlflow_compress.metrics import AnswerSamples, MetricInputs, compute_all, headline, health
from mlflow_compress.metrics.core.language import language, script
from mlflow_compress.metrics.stats.intervals import share_interval
from mlflow_compress.records import Generations, MetricResult, RunRecords
from tests.metric_records import QUICK, generations_of

DATA = Path(demo.__file__).parent / "data"


def docstrings() -> Iterator[str]:
    """Yield the docstrings of Python's standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted([*library.glob("*.py"), *library.glob("[a-su-z]*/*.py")]):
        try:
            tree = ast.parse(file.read_bytes())
        except SyntaxError:  # of another version of Python, as lib2to3's own data
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield text


@pytest.fixture(scope="module")
def ordinary() -> list[str]:
    """10,000 different texts: 5,000 docstrings at most, and passages of the demo's calibration text."""
    texts: dict[str, None] = {}
    for text in docstrings():
        texts[text] = None
        if len(texts) == 5000:
            break
    words = (DATA / "calibration.txt").read_text().split()
    for number in range(10_000 - len(texts)):
        texts[" ".join(words[8 * number : 8 * number + 20 + number % 200])] = None
    assert len(texts) == 10_000
    return list(texts)


def test_of_ten_thousand_ordinary_texts_at_most_one_in_a_thousand_is_a_loop(ordinary: list[str]) -> None:
    assert sum(health.loop_period(text) is not None for text in ordinary) <= 10


def test_of_a_thousand_planted_loops_99_percent_are_found(ordinary: list[str]) -> None:
    """Spans of 1 to 120 characters, repeated as often as a cut answer of 128 tokens (about 400 characters) holds."""
    drawn = random.Random(1)
    found = 0
    for text in drawn.sample(ordinary, 1000):
        length = drawn.randint(1, 120)
        source = drawn.choice(ordinary).ljust(length, "x")
        begin = drawn.randint(0, len(source) - length)
        span = source[begin : begin + length].strip() or "!"
        times = max(3, 400 // len(span))
        loop = span * (times + 1)
        found += health.loop_period(f"{text} {loop[: len(span) * times + drawn.randrange(len(span))]}") is not None
    assert found >= 990


@QUICK
@given(st.text("ab", max_size=60))
def test_the_period_is_the_smallest_by_its_definition(text: str) -> None:
    def length(p: int) -> int:  # of the longest end of the text with the period p
        n = p
        while n < len(text) and text[-n - 1] == text[-n - 1 + p]:
            n += 1
        return n

    periods = [
        p
        for p in range(1, len(text) // health.FEWEST_REPEATS + 1)
        if length(p) >= max(health.FEWEST_REPEATS * p, health.FEWEST_CHARACTERS)
    ]
    assert health.loop_period(text) == min(periods, default=None)


def test_a_long_loop_takes_linear_time() -> None:
    assert health.loop_period("a" * 200_000 + "b") is None  # quadratic time would be minutes
    assert health.loop_period("b" + "a" * 200_000) == 1


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("Yes, \u03b1 is small.", "LATIN"),
        ("\u041f\u0440\u0438\u0432\u0435\u0442, API!", "CYRILLIC"),
        ("\u6771\u4eac\u306f\u5927\u304d\u3044\u3002", "CJK"),  # Japanese mixes three scripts
        ("\uff21\uff22\uff23", "LATIN"),  # wide letters
        ("12 + 30 = 42", None),
        ("", None),
    ],
)
def test_script(text: str, used: str | None) -> None:
    assert script(text) == used


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("Once upon a time there was a little dog.", "en"),
        ("Es war einmal ein kleiner Hund.", "de"),
        ("Het spijt me, maar ik kan je daar niet mee helpen.", "nl"),
        ("Мне нравятся собаки и кошки.", "ru"),
        ("我喜欢狗和猫。", "zh"),
        ("Yes.", None),
        ("import numpy as np\nprint(np.zeros(3))", None),
        ("", None),
    ],
)
def test_language(text: str, used: str | None) -> None:
    assert language(text) == used


@pytest.mark.parametrize(
    ("question", "answer", "found"),
    [
        ("What is a small dog called?", "Un petit chien s'appelle un chiot.", True),
        ("What is a small dog called?", "子犬と呼ばれます。", True),
        ("What is a small dog called?", "A small dog is called a puppy.", False),
        ("What is a small dog called?", "Welpe.", False),  # one word is of no sure language
        ("42?", "Un petit chien s'appelle un chiot.", False),
    ],
)
def test_an_answer_in_another_language_than_the_question(question: str, answer: str, found: bool) -> None:
    assert ("other_language" in health.defects_of(question, answer)) == found


@pytest.mark.parametrize(
    ("question", "answer", "is_broken"),
    [
        ("Sort this.", "```python\nx.sort()\n```", False),
        ("Sort this.", "```python\nx.sort()", True),
        ("Sort this.", "````\n```\n````", False),  # a longer fence holds a shorter one
        ("Sort this.", "Use `x.sort()` or ``` in a line.", False),
        ("Answer in JSON.", '{"a": [1, 2]}', False),
        ("Answer in JSON.", 'Here it is: {"a": 1}. Bye.', False),
        ("Answer in JSON.", '```json\n{"a": 1}\n```', False),
        ("Answer in JSON.", '{"a": 1', True),
        ("Return a valid json object.", "There is none.", True),
        ("What is JSON?", "A format such as {a: 1}.", False),
    ],
)
def test_broken_format(question: str, answer: str, is_broken: bool) -> None:
    assert health.has_broken_format(question, answer) == is_broken


@pytest.mark.parametrize(
    ("prompt", "text", "unclosed"),
    [
        ("p", "<think>so</think>Yes.", False),
        ("p", "<think>so", True),
        ("p<think>\n", "so</think>Yes.", False),  # some templates begin the reasoning
        ("p<think>\n", "so and so", True),
        ("p", "Yes.", False),
    ],
)
def test_unclosed_reasoning(prompt: str, text: str, unclosed: bool) -> None:
    assert health.is_unclosed(health.SampledAnswer("q", prompt, text, 5, 9)) == unclosed


def generations(answers: Mapping[str, Sequence[str]], n_tokens: int = 4) -> Generations:
    return generations_of(answers, task="instructions", n_tokens=n_tokens)


GOOD, LOOP = "Fine.", "and so on " * 5


def computed(baseline: Generations, variant: Generations, again: Generations | None = None) -> dict[str, MetricResult]:
    questions = dict.fromkeys(baseline.column("item_id").tolist(), "What is it?")
    samples = AnswerSamples(baseline, variant, questions, 8, again)
    found = compute_all(MetricInputs(RunRecords(), RunRecords(), samples=samples))
    ours = {name: result for name, result in headline(found).items() if "refusals" not in name}
    return {name.removeprefix("judge/"): result for name, result in ours.items()}


def test_shares_by_hand() -> None:
    """Of 20 instructions with one answer each, the baseline loops in 2, the variant in 5, and is empty in 1."""
    items = [f"i{n}" for n in range(20)]
    baseline = generations({item: [LOOP if n < 2 else GOOD] for n, item in enumerate(items)})
    variant = generations({item: [LOOP if n < 5 else "" if n == 5 else GOOD] for n, item in enumerate(items)}, 8)
    found = computed(baseline, variant, baseline)
    values = {name: result.value for name, result in found.items()}
    assert values == {
        "length_ratio": 2.0,
        "length_ratio_floor": 1.0,
        "defects_pct": 30.0,
        "defects_pct_baseline": 10.0,
        "defects_delta_pct": 20.0,
        "defects_floor_pct": 0.0,
        "loops_pct": 25.0,
        "loops_delta_pct": 15.0,
        "empty_pct": 5.0,
        "empty_delta_pct": 5.0,
        "cut_pct": 100.0,  # 8 tokens are the limit. No defect by itself
        "cut_delta_pct": 100.0,
        **{f"{kind}{end}": 0.0 for kind in ("other_language", "unclosed_reasoning", "broken_format") for end in ENDS},
    }
    assert (found["loops_pct"].low, found["loops_pct"].high) == pytest.approx(
        tuple(100 * end for end in share_interval(5, 20, level=0.95))
    )


ENDS = ("_pct", "_delta_pct")


def test_a_policy_bounds_health_and_fails_without_it() -> None:
    """Loops in 30 of 100 answers more than the baseline's: at most 39.6 points by Tango's interval; twice the length."""
    items = [f"i{n:02d}" for n in range(100)]
    baseline = generations({item: [GOOD] for item in items})
    variant = generations({item: [LOOP if n < 30 else GOOD] for n, item in enumerate(items)}, 8)
    results = list(computed(baseline, variant).values())
    for margin, passes in ((40.0, True), (39.0, False)):
        policy = Policy(
            kl=None,
            gates=(MetricGate(metric="judge/length_ratio", at_most=2.5),),
            margins=(MarginGate(metric="judge/defects_delta_pct", margin=margin),),
        )
        meant = gates_of(policy)
        length, defects = (gate.checks(read_gates(results, meant.readings))[0] for gate in meant.gates)
        assert length.passed and defects.passed == passes, defects.reason
        assert not any(gate.checks({})[0].passed for gate in meant.gates)


def test_the_samples_of_an_instruction_stay_together() -> None:
    """Loops of half of the instructions, in all of four samples, have an interval as wide as that of 20 answers."""
    items = [f"i{n}" for n in range(20)]
    one = generations({item: [LOOP if n % 2 else GOOD] for n, item in enumerate(items)})
    four = generations({item: [LOOP if n % 2 else GOOD] * 4 for n, item in enumerate(items)})
    alone, together = computed(one, one)["loops_pct"], computed(four, four)["loops_pct"]
    assert together.n == 80 and together.high is not None and alone.high is not None
    assert together.high >= alone.high - 1.0


def test_unequal_numbers_of_samples_and_other_prompts_are_refused() -> None:
    two, three = generations({"a": [GOOD] * 2}), generations({"a": [GOOD] * 3})
    with pytest.raises(AlignmentError, match="variant have different samples"):
        AnswerSamples(two, three, {"a": ""}, 8)
    with pytest.raises(AlignmentError, match="baseline_again have different samples"):
        AnswerSamples(two, two, {"a": ""}, 8, three)
    ours = generations({"a": [GOOD]})
    rows = [{**row, "prompt": "another"} for row in ours.table.to_pylist()]
    with pytest.raises(AlignmentError, match="different prompts"):
        AnswerSamples(ours, Generations.from_rows(rows), {"a": ""}, 8)
