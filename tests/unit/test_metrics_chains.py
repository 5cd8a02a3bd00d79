"""The baseline's own thoughts under both models: pieces of text, values by hand, identities, markers."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoTokenizer

from benchmarks.chain_distances_predict import correlations
from mlflow_compress import demo
from mlflow_compress.commands.evaluate.own_text import places_in_chain, token_pieces
from mlflow_compress.errors import AlignmentError
from mlflow_compress.metrics import MetricInputs
from mlflow_compress.metrics.chains import CHAIN_KL, SCORED_CHAINS, chain_parts, chain_tokens
from mlflow_compress.metrics.core.metric_inputs import MetricSettings
from mlflow_compress.metrics.core.metric_registry import METRICS
from mlflow_compress.metrics.hesitation import marker_starts
from mlflow_compress.reasoning import answer_span, read_answer
from mlflow_compress.records import (
    ChainDistances,
    Chains,
    ChainScores,
    Generations,
    Items,
    MetricResult,
    RunRecords,
)
from mlflow_compress.reporting.html import render_report, thoughts_table
from mlflow_compress.reporting.page.variants_page import render_page
from mlflow_compress.reporting.thoughts import PartedThought, parted_thoughts
from tests.metric_records import item_of
from tests.page_contents import page_content
from tests.report_results import Page


@pytest.mark.parametrize(
    ("text", "markers"),
    [
        ("Wait, 3+4 is 7. But wait: no", ["Wait", "But wait"]),
        ("await the waiter", []),
        ("I\u2019m not sure. Let me double-check", ["I\u2019m not sure", "Let me double-check"]),
        ("等等,我检查一下", ["等等", "检查一下"]),
        ("Vielleicht ist das falsch, allerdings", ["Vielleicht", "allerdings"]),
        ("", []),
    ],
)
def test_markers_of_hesitation(text: str, markers: Sequence[str]) -> None:
    starts = marker_starts(text)
    assert len(starts) == len(markers)
    assert all(text.startswith(marker, start) for marker, start in zip(markers, starts, strict=True))


@pytest.mark.parametrize("text", ["<think>\u00e9\u4e2d wait\n</think>12 \U0001f600", "12+34=?", " a  b"])
def test_the_pieces_of_tokens_are_the_text(text: str) -> None:
    for folder in (demo.MODEL_DIR, demo.THINKS_MODEL_DIR):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        pieces = token_pieces(tokenizer, tokens)
        whole = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        assert len(pieces) == len(tokens) and "".join(pieces) == whole.rstrip("\ufffd")


@pytest.mark.parametrize(
    ("prompt", "pieces", "gold", "places"),
    [
        ("q", ["<think>", "7", "</think>", "So ", "1", "2", "."], "12", (3, 4, 6)),
        ("q<think>", ["7", "</think>", "\n", "12", ""], "12", (3, 3, 4)),
        ("q", ["<think>", "7", "</think>", "13"], "12", (3, None, None)),
        ("q", ["<think>", "12", ""], "12", (2, None, None)),
        ("q", ["answer is ", "12", ", not 13"], "12", (0, 1, 2)),
        ("q", [r"\boxed", "{12", "}", ""], "12", (0, 1, 2)),
    ],
)
def test_where_thought_and_answer_stand(prompt: str, pieces: list[str], gold: str, places: tuple[int, ...]) -> None:
    assert tuple(places_in_chain(prompt, pieces, "number", gold).values()) == places


@pytest.mark.parametrize(
    ("answer", "rule"), [("The answer is 1,200.", "number"), ("(B)", "letter"), ("answer: New York", "text"), ("?", "text")]
)  # fmt: skip
def test_an_answer_is_read_where_it_stands(answer: str, rule: str) -> None:
    span = answer_span(answer, rule)
    assert read_answer(answer, rule) == (None if span is None else read_answer(answer[slice(*span)], rule))


# Two chains: "a wait b c </think> 7 8" with the answer "7 8", and "d e </think> 9", whose answer is wrong. In nats:
KL = [[0.1, 0.8, 0.0, 0.2, 0.0, 0.3, 0.1], [0.0, 0.5, 0.0, 0.0]]
ENTROPY = [[1.0, 2.0, 0.1, 0.2, 0.0, 9.0, 0.0], [0.3, 0.4, 0.0, 9.0]]
SAME = [[True, True, True, False, True, True, True], [True] * 4]
NLL = [[1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.25], [1.0] * 4]  # Of the variant; the baseline's are 1/4 everywhere
PIECES = [["a ", "wait ", "b ", "c", "</think>", "7", "8"], ["d", "e", "</think>", "9"]]
PROMPT = [5, 6]


def inputs(*, copies: int = 1, identical: bool = False) -> MetricInputs:
    chains, ours, theirs, moved = [], [], [], []
    for number in range(2 * copies):
        which, item = number % 2, str(number)
        pieces = PIECES[which]
        chains.append(
            {
                **{"task": "t", "item_id": item, "sample": 0, "prompt_tokens": PROMPT, "pieces": pieces},
                **{"tokens": [*range(len(pieces))], "n_thought": pieces.index("</think>") + 1},
                **({"answer_begin": 5, "answer_end": 7} if which == 0 else {"answer_begin": None, "answer_end": None}),
            }
        )
        for at in range(len(pieces)):
            key = {"task": "t", "item_id": f"{item}/0", "position": len(PROMPT) + at}
            score = {**key, "target": at, "p_target": 0.5, "entropy": ENTROPY[which][at]}
            ours.append({**score, "nll": 0.25, "argmax": at})
            theirs.append({**score, "nll": 0.25 if identical else NLL[which][at], "argmax": at})
            zero = dict.fromkeys(ChainDistances.SCHEMA.names, 0.0)
            moved.append(
                {
                    **{**zero, **key, "kl": 0.0 if identical else KL[which][at]},
                    "same_top": identical or SAME[which][at],
                }
            )
    written = Chains.from_rows(chains)
    base = RunRecords(chains=written, chain_scores=ChainScores.from_rows(ours))
    distances = ChainDistances.from_rows(moved)
    variant = RunRecords(chains=written, chain_scores=ChainScores.from_rows(theirs), chain_distances=distances)
    return MetricInputs(base, variant, settings=MetricSettings(resamples=200))


def results(given: MetricInputs) -> dict[tuple[str, str | None], MetricResult]:
    found = [r for name in ("chain_kl", "chain_places") for r in METRICS.get(name).compute(given)]
    return {(r.name.removeprefix("reasoning/"), r.category): r for r in found}


def test_every_value_by_hand() -> None:
    """Of 8 tokens of thoughts two are forking places: entropies 2 and 1 are above the quantile, 0.64."""
    found = {key: r.value for key, r in results(inputs()).items()}
    assert found["chain_kl", None] == pytest.approx(2.0 / 11)
    # Thoughts have 5 and 3 tokens: the tenths of the first begin with its tokens 1, 3, 5, 7 and 9.
    assert found["chain_kl", "tenth 1 of the thought"] == pytest.approx((0.1 + 0.0) / 2)
    assert found["chain_kl", "tenth 3 of the thought"] == pytest.approx(0.8)
    assert found["chain_kl", "tenth 4 of the thought"] == pytest.approx(0.5)
    assert ("chain_kl", "tenth 2 of the thought") not in found
    assert found["chain_kl", "first 100 tokens of the thought"] == pytest.approx(1.6 / 8)
    assert found["chain_kl", "last 100 tokens of the thought"] == pytest.approx(1.6 / 8)
    assert found["chain_kl", "behind the thought"] == pytest.approx(0.4 / 3)
    assert found["chain_kl", "forking places"] == pytest.approx(0.45)
    assert found["chain_kl", "other places of the thought"] == pytest.approx(0.7 / 6)
    assert found["chain_kl", "hesitation markers at forking places"] == pytest.approx(0.8)
    assert found["chain_kl_forking_ratio", None] == pytest.approx(0.45 / (0.7 / 6))
    assert found["chain_kl_hesitation_ratio", None] == pytest.approx(0.8 / (0.8 / 7))
    assert found["chain_kl_hesitation_forking_ratio", None] == pytest.approx(0.8 / 0.1)
    # The first chain parts at its fourth token, the second never: half of the chains have parted there.
    assert found["chain_parted_pct", None] == 50.0
    assert found["chain_first_parted_token", None] == 4.0
    # The baseline has -1/4 nat at both tokens of "78", the variant -1/2 and -1/4.
    assert found["chain_answer_logprob_delta", None] == pytest.approx(-0.25)
    one = results(inputs())["chain_answer_logprob_delta", None]
    assert (one.n, one.n_unscored) == (1, 1)


def test_parts_share_out_the_tokens() -> None:
    tokens = chain_tokens(inputs(copies=3))
    parts = dict(chain_parts(tokens))
    tenths = sum(rows.astype(int) for name, rows in parts.items() if name.startswith("tenth"))
    assert np.array_equal(tenths + parts["behind the thought"], np.ones(len(tokens.kl)))
    assert np.array_equal(parts["forking places"] ^ parts["other places of the thought"], tokens.thought)
    assert 5 * parts["forking places"].sum() <= tokens.thought.sum() + 5


def test_equal_models_have_no_distance() -> None:
    found = results(inputs(copies=12, identical=True))
    assert all(r.value == 0.0 for (name, _), r in found.items() if name == "chain_kl")
    assert found["chain_parted_pct", None].value == found["chain_answer_logprob_delta", None].value == 0.0
    assert {name for name, _ in found} == {"chain_kl", "chain_parted_pct", "chain_answer_logprob_delta"}


def test_intervals_are_over_questions_and_few_have_none() -> None:
    many, few = results(inputs(copies=12)), results(inputs())
    for name in ("chain_kl", "chain_parted_pct", "chain_kl_forking_ratio"):
        result = many[name, None]
        assert result.low is not None and result.high is not None and result.low < result.value < result.high, name
    assert few["chain_kl", None].low is None


def test_scores_of_other_tokens_are_refused() -> None:
    given = inputs()
    rows = [{**row, "target": 99} for row in given.variant.chain_scores.table.to_pylist()]  # type: ignore[union-attr]
    other = replace(given.variant, chain_scores=ChainScores.from_rows(rows))  # type: ignore[type-var]
    with pytest.raises(AlignmentError, match="different target tokens"):
        results(MetricInputs(given.baseline, other))
    assert MetricInputs(RunRecords(), RunRecords()).missing(*SCORED_CHAINS) == "the baseline has no chains records"


HOSTILE = "<script>1</script>"


def thought_of(pieces: Sequence[str], kl: Sequence[float], parts: int, drawn: str) -> PartedThought:
    """What is shown of one question, "2+3=?", whose two drawn answers are lost; `parts` is where the models part."""
    n, key = len(pieces), {"task": "t", "item_id": "0"}
    chain = {**key, "sample": 0, "prompt_tokens": PROMPT, "tokens": [*range(n)], "pieces": [*pieces]}
    chain |= {"n_thought": pieces.index("</think>") + 1, "answer_begin": n - 1, "answer_end": n}
    rows = [{**key, "item_id": "0/0", "position": len(PROMPT) + at} for at in range(n)][::-1]
    zero = dict.fromkeys(ChainDistances.SCHEMA.names, 0.0)
    moved = [{**zero, **row, "kl": kl[-1 - at], "same_top": n - 1 - at != parts} for at, row in enumerate(rows)]
    scores = [{**row, "target": 0, "nll": 0.0, "p_target": 1.0, "argmax": n - 1, "entropy": 0.0} for row in rows]

    def written(*texts: str) -> Generations:
        row = {**key, "turn": 0, "prompt": "q", "n_tokens": 1, "correct": None}
        return Generations.from_rows([{**row, "sample": at, "text": text} for at, text in enumerate(texts)])

    item = item_of(0, family="thinking", rule="number", options=None, gold=None, answers=["5", "99"])
    right = "<think>answer is 5</think>5"
    base = RunRecords(
        items=Items.from_rows([item]), chains=Chains.from_rows([chain]), generations=written("", *[right] * 4)
    )
    variant = RunRecords(
        chain_distances=ChainDistances.from_rows(moved),
        chain_scores=ChainScores.from_rows(scores),
        generations=written("", "<think>answer is 7</think>7", drawn),
    )
    problem = {**key, "question": "2+3=?", "answer": "5", "right_baseline": 2, "read_baseline": 2}
    problem |= {"right_variant": 0, "read_variant": 2}
    assert parted_thoughts("v", [problem], base, replace(variant, chain_scores=None), most=3) == []
    same = {**problem, "right_variant": 2}
    [shown] = parted_thoughts("v", [same, problem, {**problem, "item_id": "1"}], base, variant, most=3)
    return shown


def test_where_thoughts_part_is_shown_with_what_was_concluded() -> None:
    """The root of a KL of 1/4 is 1/2, which is the fourth of eight shades; what is found and lost is shown."""
    pieces = [HOSTILE, "answer is ", "4", "\n", "answer is ", "5", "</think>", "5"]
    kl = [0.0, 0.0, 0.25, 0.0, 9.0, 0.0, 0.001, 0.0]
    shown = thought_of(pieces, kl, 2, f"<think>{HOSTILE}answer is 5\nanswer is 6</think>6")
    assert (shown.right, shown.lost, shown.answers) == (("2 of 2", "0 of 2"), True, ("5 (2)", "7, 6"))
    assert shown.parts == "the variant diverges at token 3 of 8, where it would write '5'"
    right, wrong = "concluded right", "concluded wrong"
    assert shown.baseline == [
        (f"{HOSTILE}answer is ", ""), ("4", f"h4 parts {wrong}"), ("\n", ""), ("answer is ", "h8"), ("5", right),
        ("</think>", ""), ("5", right),
    ]  # fmt: skip
    assert shown.drawn == "a wrong answer, right in the reasoning"
    assert [(text, look) for text, look in shown.variant_text if look] == [("5", right), ("6", wrong), ("6", wrong)]
    for page in (
        render_report(title="t", verdict="v", results=[], thoughts=[shown]),
        render_page(replace(page_content(), thoughts=[shown])),
    ):
        assert HOSTILE not in page and HOSTILE in Page(page).text and "Where thoughts part" in page
        assert "Where thoughts part" not in render_report(title="t", verdict="v", results=[])
        for style in ("h4", "parts", "concluded.right"):
            assert f".{style} {{" in page


def test_of_a_long_thought_the_place_where_models_part_and_the_end_are_shown() -> None:
    shown = thought_of([*["a "] * 16000, "</think>", "5"], [0.0] * 16002, 8000, "<think>b</think>" + "x" * 9000 + "7")
    left_out = [text for text, look in shown.baseline if look == "left-out"]
    assert left_out == [" … 7,900 more … ", f" … {16002 - 150 - 8400:,} more … "]
    assert sum(text.count("a ") for text, _ in shown.baseline) == 500 + 148
    assert sum(len(text) for text, look in shown.variant_text if look != "left-out") < 4 * 650
    assert shown.baseline[-1] == ("5", "concluded right")


def test_the_report_lists_the_places() -> None:
    found = [*results(inputs(copies=12)).values()]
    table = thoughts_table(found)
    assert len(table.rows) == sum(r.name == CHAIN_KL.name and r.category is not None for r in found)
    assert "forking places" in table.html() and not thoughts_table([]).rows


def test_distances_are_ranked_against_the_loss_over_variants() -> None:
    """The benchmark's correlations: 1 for the loss's own order, -1 for the other, none where nothing differs."""
    rows = [{"loss": n, "chain_kl": float(n) ** 3, "back": -n, "none": -np.inf} for n in range(12)]
    found = {name: (value, more) for name, value, more in correlations(rows)}
    assert found["chain_kl"] == ("1.00 [1.00, 1.00]", "0.00 [0.00, 0.00]")
    assert found["back"] == ("-1.00 [-1.00, -1.00]", "-2.00 [-2.00, -2.00]")
    assert found["none"] == ("none", "none")
