"""Answers behind a thought: reading, values by hand, identities, pass@k, and coverage where the truth is known."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import false_discovery_control

from benchmarks.thinking_coverage import coverage
from mlflow_compress.config.policy import Policy
from mlflow_compress.decide.promotion import Candidate, checks_of, gate_numbers, gates_of, policy_answer
from mlflow_compress.errors import AlignmentError
from mlflow_compress.metrics import MetricInputs, headline
from mlflow_compress.metrics.core.metric_inputs import MetricSettings
from mlflow_compress.metrics.core.metric_registry import METRICS
from mlflow_compress.metrics.stats.significance import benjamini_hochberg
from mlflow_compress.metrics.thinking import DrawnAnswers, pass_at_k, questions_table, squared_change
from mlflow_compress.reasoning import conclusions, parted, read_answer, stays_in_thought
from mlflow_compress.records import Generations, Items, MetricResult, RunRecords
from mlflow_compress.reporting.details import flips_table
from mlflow_compress.reporting.page.page_content import changes_of
from mlflow_compress.reporting.verdict import verdict
from tests.metric_records import item_of

LIMIT = 100
Reply = str | tuple[str, int]  # With its tokens, or as many as it has characters


@pytest.mark.parametrize(
    ("answer", "compare", "read"),
    [
        ("171", "number", "171"), ("The sum is 1,200.0.", "number", "1200"), ("3/4", "number", "3/4"),
        ("0.75", "number", "3/4"), ("-.5", "number", "-1/2"), (r"So \boxed{12} of 30.", "number", "12"),
        ("The answer is 7, not 8.", "number", "7"), ("First 3, then 4", "number", "4"), ("none", "number", None),
        ("(B)", "letter", "B"), ("The answer is (C) because A is wrong", "letter", "C"), ("A or B", "letter", None),
        ("I think it is D.", "letter", "D"), ("nothing", "letter", None),
        ("  Paris. ", "text", "paris"), ("Answer: New  York!", "text", "new york"), ("...", "text", None),
    ],
)  # fmt: skip
def test_answers_are_read(answer: str, compare: str, read: str | None) -> None:
    assert read_answer(answer, compare) == read


@pytest.mark.parametrize(
    ("prompt", "reply", "thought", "answer", "stays"),
    [
        ("q", "<think>a</think>\n7", "<think>a</think>", "7", False),
        ("q", "7", "", "7", False),
        ("q<think>\n", "a</think>7", "<think>a</think>", "7", False),
        ("q<think>", "a 7", "<think>a 7", "", True),
        ("q", "<think>a", "<think>a", "", True),
        ("q", "<think>a</think>", "<think>a</think>", "", False),
    ],
)
def test_thought_and_answer_are_told_apart(prompt: str, reply: str, thought: str, answer: str, stays: bool) -> None:
    assert parted(prompt, reply) == (thought, answer)
    assert stays_in_thought(prompt, reply) is stays


def test_a_thought_concludes_what_is_boxed_or_called_the_answer() -> None:
    text = "5+7=12\nanswer is 12\nno, the answer is: 13.\n" + r"\boxed{14} is 2 less than 16"
    assert [*conclusions(text, "number")] == ["12", "13", "14"]
    for end in ("</think>", "\n</think>", "[/THINK]", " <|end_of_thought|>", ""):
        assert [*conclusions(f"<think>answer is New York.{end}", "text")] == ["new york"]


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 2), (8, 4), (8, 8)])
def test_pass_at_k_is_the_share_of_sets_with_a_right_answer(n: int, k: int) -> None:
    for c in range(n + 1):
        sets = [any(i < c for i in chosen) for chosen in itertools.combinations(range(n), k)]
        assert pass_at_k(c, n, k) == pytest.approx(np.mean(sets))
        # As HumanEval's code computes it.
        published = 1.0 if n - c < k else 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))
        assert pass_at_k(c, n, k) == pytest.approx(published)


def test_benjamini_hochberg_is_scipys() -> None:
    p = np.random.default_rng(4).random(30) ** 3
    assert benjamini_hochberg(p) == pytest.approx(false_discovery_control(p))


def answers_of(right: np.ndarray, n: int) -> DrawnAnswers:
    no = np.zeros_like(right, dtype=bool)
    return DrawnAnswers([[None] * n] * len(right), right, no * 1.0, no * 1.0, no, no, no, no, no)


def test_the_squared_change_has_no_bias_of_sampling() -> None:
    """The mean over every outcome of 3 and 3 draws, weighted by its probability, is ``(p - q)^2``."""
    p, q, mean = 0.3, 0.8, 0.0
    outcomes = np.array([*itertools.product((0.0, 1.0), repeat=3)])
    for a, b in itertools.product(outcomes, outcomes):
        weight = np.prod(np.where(a == 1, p, 1 - p)) * np.prod(np.where(b == 1, q, 1 - q))
        mean += weight * squared_change(answers_of(a[None], 3), answers_of(b[None], 3))[0]
    assert mean == pytest.approx((p - q) ** 2)


def inputs(
    models: Sequence[Sequence[Sequence[Reply]]], golds: Sequence[str], *, rule: str = "number", resamples: int = 200
) -> MetricInputs:
    """The baseline's first and second sampling, and the variant's: of each question its replies."""
    rows = [
        item_of(i, family="thinking", rule=rule, options=None, gold=None, answers=[gold, str(LIMIT)])
        for i, gold in enumerate(golds)
    ]

    def generations(*samplings: Sequence[Sequence[Reply]]) -> Generations:
        cells = [
            {"task": "t", "item_id": str(i), "turn": 0, "sample": s * len(replies) + n + 1, "prompt": "q", "text": text,
             "n_tokens": tokens, "correct": None}
            for s, sampling in enumerate(samplings)
            for i, replies in enumerate(sampling)
            for n, reply in enumerate(replies)
            for text, tokens in [reply if isinstance(reply, tuple) else (reply, len(reply))]
        ]  # fmt: skip
        return Generations.from_rows(cells)

    items = Items.from_rows(rows)
    ours = RunRecords(items=items, generations=generations(models[0], models[1]))
    theirs = RunRecords(items=items, generations=generations(models[2]))
    return MetricInputs(ours, theirs, settings=MetricSettings(resamples=resamples))


def results(given: MetricInputs) -> dict[str, MetricResult]:
    found = [r for name in ("thinking", "thought_length") for r in METRICS.get(name).compute(given)]
    return {name.removeprefix("reasoning/"): result for name, result in headline(found).items()}


HESITATIONS = [f"hesitation_per_1k{end}" for end in ("", "_baseline", "_delta", "_floor")]


def said(*concluded: int, tokens: int = 10) -> Reply:
    """A reply that concludes some numbers on the way, and the last one."""
    thought = "\n".join(f"answer is {number}" for number in concluded)
    return f"<think>{thought}</think>{concluded[-1]}", tokens


CUT: Reply = ("<think>answer is 1", LIMIT)
UNREAD: Reply = ("<think>hm</think>nothing", 20)


def test_every_value_by_hand() -> None:
    """Three questions, right: 1, 2, 3; four answers of each model and sampling."""
    right = [[said(i)] * 4 for i in (1, 2, 3)]
    first = [right[0], right[1], [said(9)] * 4]
    again = [right[0], [said(2), said(2), said(2), said(2, 9)], [said(9)] * 4]
    # Right 2, 1 and 0 of 4; one cut answer has found 1, one wrong answer had found 2, and one concludes 3 by accident.
    variant = [
        [said(1), said(1, tokens=30), CUT, UNREAD],
        [said(2, tokens=20), said(2, 8, tokens=20), said(3), said(7)],
        [said(9)] * 4,
    ]
    found = {name: result.value for name, result in results(inputs([first, again, variant], ["1", "2", "3"])).items()}
    # squared changes: p, q, and what is taken off for 4 answers (3 where one cannot be read) of each:
    # (1 - 2/3)^2 - (2/9)/2 = 0; (1 - 1/4)^2 - (3/16)/3 = 0.5; 0. The floor: 0; (1/4)^2 - (3/16)/3 = 0; 0.
    wanted = {
        "pass_at_1": 3 / 11, "pass_at_1_baseline": 7 / 12, "pass_at_1_delta": 3 / 11 - 6 / 11, "pass_at_1_floor": -1 / 12,
        # k = 2 of 4: 1 - C(1,2)/C(3,2) = 1; 1 - C(3,2)/C(4,2) = 1/2; 0. The baseline's: 1, 1, 0.
        "pass_at_k": 0.5, "pass_at_k_baseline": 2 / 3, "pass_at_k_delta": -1 / 6,
        # The second question has four answers once each, of which one is right.
        "majority_at_k": (1 + 0.25) / 3, "majority_at_k_baseline": 2 / 3, "majority_at_k_delta": -0.25,
        "flips_pct": 50 / 3, "flips_floor_pct": 0.0, "lost_pct": 0.0, "won_pct": 0.0,
        "length_ratio": (160 + 60 + 40) / 120, "length_ratio_floor": 1.0,
        # Right ones: mean 20 of 10, and 20 of 10. Wrong ones: 40/3 of 10 (second question), 10 of 10 (third).
        "length_ratio_right": 2.0, "length_ratio_wrong": (40 / 3 + 10) / 20,
        "cut_pct": 100 / 12, "cut_pct_baseline": 0.0, "cut_delta_pct": 100 / 12,
        **{"loops_pct": 0.0, "loops_pct_baseline": 0.0, "loops_delta_pct": 0.0},
        "unclosed_pct": 100 / 12, "unclosed_pct_baseline": 0.0, "unclosed_delta_pct": 100 / 12,
        # Wrong: 1 + 3 + 4 of the variant, two of which had found it; 1 + 4 of the baseline, one of which had.
        "found_and_lost_pct": 25.0, "found_and_lost_pct_baseline": 20.0, "found_and_lost_delta_pct": 5.0,
        # The next questions' answers are 2, 3 and 1: only the second question's third answer concludes it.
        "found_by_chance_pct": 12.5,
        # The variant's one marker is the "hm" of the answer that cannot be read.
        **dict(zip(HESITATIONS, (1000 / 260, 0.0, 1000 / 260, 0.0), strict=True)),
        "tokens_per_right": 260 / 3, "tokens_per_right_baseline": 120 / 7, "tokens_per_right_ratio": 260 / 3 / (120 / 7),
    }  # fmt: skip
    assert found == pytest.approx(wanted)
    table = questions_table(inputs([first, again, variant], ["1", "2", "3"]))
    assert [(row["right_baseline"], row["right_variant"], row["read_variant"]) for row in table] == [
        (4, 2, 3),
        (4, 1, 4),
        (0, 0, 4),
    ]


def test_what_cannot_be_read_is_counted_and_a_cut_answer_is_not_right() -> None:
    answers = [[UNREAD, CUT, said(1), said(1)]] * 3
    found = results(inputs([answers] * 3, ["1"] * 3))
    assert found["pass_at_1"].value == pytest.approx(2 / 3)
    assert (found["pass_at_1"].n, found["pass_at_1"].n_unscored) == (9, 3)


def test_a_model_against_itself_has_not_moved_and_the_order_of_rows_does_not_matter() -> None:
    rng = np.random.default_rng(1)
    one, two = ([[said(int(n)) for n in rng.integers(0, 3, 8)] for _ in range(20)] for _ in range(2))
    given = inputs([one, two, two], ["1"] * 20)
    same = results(given)
    for name in (
        "pass_at_1_delta",
        "pass_at_k_delta",
        "majority_at_k_delta",
        "cut_delta_pct",
        "found_and_lost_delta_pct",
    ):
        assert same[name].value == 0, name
    for name in ("length_ratio", "length_ratio_right", "length_ratio_wrong", "tokens_per_right_ratio"):
        assert same[name].value == pytest.approx(1.0), name
    assert same["flips_pct"].value == pytest.approx(same["flips_floor_pct"].value)
    assert same["lost_pct"].value == same["won_pct"].value == 0
    for run in (given.baseline, given.variant):
        assert run is not None and run.generations is not None
        table = run.generations.table
        object.__setattr__(run, "generations", Generations(table.take(list(range(len(table)))[::-1])))
    assert results(given) == same


def test_lost_and_won_questions_are_those_of_fishers_test() -> None:
    sure, none, half = [said(1)] * 8, [said(9)] * 8, [said(1), said(9)] * 4
    ours, theirs = [sure, none, half, *[sure] * 7], [none, sure, half, *[sure] * 7]
    given = inputs([ours, ours, theirs], ["1"] * 10)
    found = results(given)
    assert found["lost_pct"].value == found["won_pct"].value == 10.0
    assert found["flips_pct"].value == pytest.approx(10 * (1 + 1 - 2 / 4 / 7))
    assert [row["change"] for row in questions_table(given)][:3] == ["lost", "won", None]


def test_a_missing_answer_is_refused() -> None:
    given = inputs([[[said(1)] * 2] * 3] * 3, ["1"] * 3)
    assert given.variant is not None and given.variant.generations is not None
    short = Generations(given.variant.generations.table.slice(0, 5))
    object.__setattr__(given.variant, "generations", short)
    with pytest.raises(AlignmentError, match="Answers with thoughts are missing"):
        results(given)


def test_any_of_them_can_be_gated() -> None:
    policy = Policy.model_validate(
        {
            "gates": [
                {"metric": "reasoning/length_ratio", "at_most": 1.2},
                {"metric": "reasoning/found_and_lost_pct", "at_most": 30},
            ],
            "margins": [{"metric": "reasoning/pass_at_1_delta", "margin": 0.02}],
        }
    )
    gates = gates_of(policy)
    right = [[said(1)] * 8] * 20
    theirs = [[said(1), said(1), *[said(1, 9, tokens=20)] * 6]] * 20
    found = results(inputs([right, right, theirs], ["1"] * 20))
    candidate = Candidate(
        name="v", run_id="", version=None, method="rtn", items=20, makes=None, served=True,
        metrics=gate_numbers(list(found.values()), gates.readings),
    )  # fmt: skip
    answer = policy_answer(checks_of(candidate, gates.gates), 20).text("the policy")
    for words in ("reasoning/length_ratio", "reasoning/found_and_lost_pct", "reasoning/pass_at_1_delta"):
        assert words in answer, answer


def test_the_verdict_says_what_became_of_right_answers_and_of_their_price() -> None:
    right = [[said(1)] * 4] * 20
    theirs = [[said(1), said(1), said(9), said(1 + 8 * (i % 2))] for i in range(20)]  # 80 answers, 50 of them right
    found = {r.name: r for r in results(inputs([right, right, theirs], ["1"] * 20)).values()}
    said_of = verdict("v", found, size_ratio=2.0)
    assert "; right answers to problems -37.5 pt [" in said_of and "; 2.0x smaller, but 1.60x [1." in said_of
    assert said_of.endswith("] as many tokens to a right answer")
    same = {r.name: r for r in results(inputs([right] * 3, ["1"] * 20)).values()}
    assert verdict("v", same, size_ratio=None).endswith("size not known, and 1.00x as many tokens to a right answer")
    assert "problems" not in verdict("v", {}, size_ratio=2.0)


def test_a_cut_answer_loops_where_it_repeats_itself_until_the_end() -> None:
    again = "wait, check the sum again. "
    cut, ended = (f"<think>{'x' * 9000}{4 * again}", LIMIT), (f"<think>7</think>{4 * again}", LIMIT - 1)
    theirs = [[cut, ended, CUT, said(1)]] * 20
    found = results(inputs([[[said(1)] * 4] * 20] * 2 + [theirs], ["1"] * 20))
    assert [found[name].value for name in ("loops_pct", "loops_pct_baseline", "loops_delta_pct")] == [25.0, 0.0, 25.0]
    assert found["cut_pct"].value == 50.0


def test_hesitation_is_counted_in_thoughts_alone() -> None:
    """The variant has two markers in 40 tokens, the baseline's second sampling one in 20, its first none."""
    first: Reply = ("<think>7</think>Wait, 1", 20)
    again: Reply = ("<think>wait, 7</think>1", 20)
    variant: Reply = ("<think>7. Wait. Let me check</think>1", 40)
    found = results(inputs([[[one]] for one in (first, again, variant)], ["1"]))
    assert [found[name].value for name in HESITATIONS] == pytest.approx([50.0, 50.0, 0.0, 50.0])


def test_changed_answers_are_shown_as_they_were_concluded() -> None:
    """The first question's greedy answer is lost as the thought is cut, the second's as another number is concluded."""
    items = Items.from_rows(
        [
            item_of(i, family="thinking", rule="number", options=None, gold=None, answers=["1,200", str(LIMIT)])
            for i in range(2)
        ]
    )

    def model(*replies: tuple[str, bool]) -> RunRecords:
        row = {"task": "t", "turn": 0, "sample": 0, "prompt": "q", "n_tokens": 9}
        cells = [{**row, "item_id": str(i), "text": text, "correct": right} for i, (text, right) in enumerate(replies)]
        return RunRecords(items=items, generations=Generations.from_rows(cells))

    right = "<think>answer is 7</think>It is 1200.0.", True
    base, cut = model(right, right), model(("<think>answer is 1200", False), (r"<think>7</think>\boxed{7} of 9", False))
    shown = [[row[name] for name in ("gold", "baseline", "variant")] for row in flips_table(MetricInputs(base, cut))]
    assert shown == [["1,200", "1200.0", None], ["1,200", "1200.0", "7"]]
    changes = changes_of(base, cut)
    assert [side["concluded"] for side in changes.answers] == [None, "7"]
    assert [side["concluded"] for side in changes.baseline] == ["1200.0"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("loss", [0.0, 0.1, 0.3])
def test_intervals_cover_known_truths(loss: float) -> None:
    """At least 93 %, less two standard errors; `thinking` says how often. A sure loss is seen, and no other."""
    draws = 300
    shares = coverage(40, 8, loss, draws)
    seen = shares["seen"]
    shares = {name: share for name, share in shares.items() if not name.startswith("seen")}
    assert min(shares.values()) >= 93.0 - 200.0 * np.sqrt(0.95 * 0.05 / draws), shares
    assert seen <= 5.0 if loss == 0.0 else seen >= 80.0
