"""Judges that think aloud: what they weigh is no rating, and a reply that is cut off in its thought has none."""

from pathlib import Path
from typing import Any

import pytest

from mlflow_compress.judges.asking import gradings, shown_answers
from mlflow_compress.metrics.refusals import refuses
from mlflow_compress.reasoning import without_reasoning
from mlflow_compress.records import Generations
from tests.judge_server import completion
from tests.judging import WRITING, Instruction, answers, graded

QUOTES = 'The format example says "Rating: [[5]]". Now let me weigh [[3]]'


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("Good. Rating: [[8]]", "Good. Rating: [[8]]"),
        ("<think>[[3]]</think>\nRating: [[8]]", "\nRating: [[8]]"),
        ("  <THINKING type='long'>\n[[3]]</THINKING>[[8]]", "  [[8]]"),
        ("<thought>[[3]]</thought>[[8]]", "[[8]]"),
        ("<reasoning>[[3]]</reasoning>[[8]]", "[[8]]"),
        ("<seed:think>[[3]]</seed:think>[[8]]", "[[8]]"),
        ("[THINK][[3]][/THINK][[8]]", "[[8]]"),
        ("◁think▷[[3]]◁/think▷[[8]]", "[[8]]"),
        ("<|begin_of_thought|>[[3]]<|end_of_thought|>[[8]]", "[[8]]"),
        ("<|START_THINKING|>[[3]]<|END_THINKING|>[[8]]", "[[8]]"),
        ("<|channel>thought\n[[3]]<channel|>[[8]]", "[[8]]"),
        ("Here is my thought process:\n[[3]]\nHere is my response:\n[[8]]", "\n[[8]]"),
        # gpt-oss: with its special tokens, with the first of them in the prompt, and without them
        (
            "<|channel|>analysis<|message|>[[3]]<|end|><|start|>assistant<|channel|>final<|message|>[[8]]<|return|>",
            "[[8]]",
        ),
        ("analysis<|message|>[[3]]<|end|><|start|>assistant<|channel|>final<|message|>[[8]]", "[[8]]"),
        ("<|channel|>final<|message|>[[8]]", "[[8]]"),
        ("analysisMaybe [[3]], no.assistantfinal[[8]]", "[[8]]"),
        ("analysisone [[3]]assistantfinalRating: [[8]]", "Rating: [[8]]"),
        # the opening tag is in the prompt
        ("[[3]] at first sight.\n</think>\n[[8]]", "\n[[8]]"),
        ("[[3]][/THINK][[8]]", "[[8]]"),
        # more than one thought
        ("<think>[[3]]</think>So. <think>[[4]]</think>[[8]]", "So. [[8]]"),
        ("<think>[[3]]</think>Rating: [[8]]\n<think>It is done [[4]]</think>", "Rating: [[8]]\n"),
        ("<think>[[3]]<think>[[4]]</think>[[5]]</think>[[8]]", "[[8]]"),
        ("<think>[[3]]<thinking>[[4]]</thinking>[[5]]</think>[[8]]", "[[8]]"),
        ("<think>\n<think>\n[[3]]</think>[[8]]", "[[8]]"),
        ("[[3]]</think>[[4]]</think>[[8]]", "[[8]]"),
        ("<think/>[[8]]", "<think/>[[8]]"),
        # no end
        (f"<think>{QUOTES}", ""),
        (f"<think>a</think>b<think>{QUOTES}", "b"),
        (f"<think>a<think>b</think>{QUOTES}", ""),
        (f"<|channel|>analysis<|message|>{QUOTES}", ""),
        (f"<|channel|>commentary to=x<|message|>{QUOTES}<|end|><|start|>assistant<|channel|>analysis<|message|>", ""),
        ("analysisThe format says [[5]]", ""),
        ("Here's my thought process: [[5]]", ""),
        # words about tags, and words that only look like a head
        (
            "The answer ends with `</think>`, which is odd. Rating: [[4]]",
            "The answer ends with `</think>`, which is odd. Rating: [[4]]",
        ),
        ('It begins with "<think>". [[4]]', 'It begins with "<think>". [[4]]'),
        ("analysis: both are right. [[4]]", "analysis: both are right. [[4]]"),
        ("I think [[8]] is right", "I think [[8]] is right"),
    ],
)
def test_without_reasoning(reply: str, answer: str) -> None:
    assert without_reasoning(reply) == answer


# How an endpoint gives a thought that quotes marks, and then an answer; `cut` has no answer.
THOUGHT, LAST = "Both say {mark} somewhere. First {other}, then", "It is right.\n\n{mine}"
WAYS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "in the text": (f"<think>{THOUGHT}</think>\n{LAST}", f"<think>{THOUGHT}", {}),
    "opened by the prompt": (f"{THOUGHT}</think>\n{LAST}", THOUGHT, {}),
    "gpt-oss": (
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{LAST}<|return|>",
        f"<|channel|>analysis<|message|>{THOUGHT}",
        {},
    ),
    "reasoning_content": (LAST, None, {"reasoning_content": THOUGHT}),
    "reasoning": (LAST, "", {"reasoning": THOUGHT}),
    "reasoning_details": (LAST, None, {"reasoning_details": [{"type": "reasoning.text", "text": THOUGHT}]}),
    "parts": (
        [{"type": "reasoning", "text": THOUGHT}, {"type": "text", "text": LAST}],
        [{"type": "reasoning", "text": THOUGHT}],
        {},
    ),
    "parts of parts": (
        [{"type": "thinking", "thinking": [{"type": "text", "text": THOUGHT}]}, {"type": "text", "text": LAST}],
        [{"type": "thinking", "thinking": [{"type": "text", "text": THOUGHT}]}],
        {},
    ),
}
PAIR = {"given": {"baseline": answers(WRITING, by="one"), "variant": answers(WRITING, by="two")}, "name": "pairwise"}
JUDGES: dict[str, tuple[dict[str, str], list[float], dict[str, Any]]] = {
    "mt_bench": ({"mark": "[[5]]", "other": "[[3]]", "mine": "Rating: [[8]]"}, [8, 8], {}),
    # A is the baseline's answer in the first order, and the variant's in the second
    "pairwise": ({"mark": "[[C]]", "other": "[[B]]", "mine": "[[A]]"}, [0, 1, 0, 1], PAIR),
}


def filled(part: Any, words: dict[str, str]) -> Any:
    if isinstance(part, list):
        return [filled(one, words) for one in part]
    if isinstance(part, dict):
        return {name: filled(value, words) for name, value in part.items()}
    return part.format(**words) if isinstance(part, str) else part


@pytest.mark.parametrize("name", JUDGES)
@pytest.mark.parametrize("way", WAYS)
def test_a_rating_is_read_behind_the_thought_and_the_whole_reply_is_kept(tmp_path: Path, way: str, name: str) -> None:
    words, scores, settings = JUDGES[name]
    whole, cut, message = (filled(part, words) for part in WAYS[way])
    for finish in ("stop", "length"):  # cut behind the rating, it still counts
        judged, _ = graded(
            lambda *_, finish=finish: (200, completion(whole, finish=finish, **message)),
            tmp_path / finish,
            WRITING,
            **settings,
        )
        found = judged.judgments["variant"]
        assert found.column("score").tolist() == scores
        assert all(THOUGHT.format(**words) in text for text in found.column("judgment"))
    # A thought that quotes ratings, and is cut off, is none: unscored by the name of the limit.
    judged, _ = graded(
        lambda *_: (200, completion(cut, finish="length", **message)),
        tmp_path / "cut",
        WRITING,
        judge_attempts=1,
        judge_max_unscored=1.0,
        **settings,
    )
    found = judged.judgments["variant"]
    assert found.column("reason").tolist() == ["length"] * len(scores)
    assert judged.values["judge/unscored/length"] == judged.values["judge/unscored"] == len(scores)
    assert all(THOUGHT.format(**words) in text for text in found.column("judgment"))


def test_a_single_thought_that_quotes_one_rating_is_no_rating(tmp_path: Path) -> None:
    thought = 'The format example says "Rating: [[5]]". Now let me weigh helpfulness, then depth, and'
    for number, text in enumerate((f"<think>{thought}", thought)):
        script = completion(text, finish="length")
        judged, server = graded(lambda *_, s=script: (200, s), tmp_path / str(number), WRITING, judge_attempts=2)
        assert judged.judgments["variant"].column("reason").tolist() == ["length", "length"]
        assert "2 of 2 judgments have no rating: 2 length" in str(judged.failed)
        assert sorted(body["max_tokens"] for body in server.bodies) == [2048, 2048, 4096, 4096]


def test_a_finished_reply_that_is_a_thought_alone_has_no_rating(tmp_path: Path) -> None:
    once = {"judge_attempts": 1, "judge_max_unscored": 1.0}
    judged, _ = graded(lambda *_: "<think>[[5]] or so", tmp_path, WRITING, **once)
    assert judged.judgments["variant"].column("reason").tolist() == ["no_rating", "no_rating"]


@pytest.mark.parametrize(
    "opening", ["<think>A recipe, then.</think>\n", "A recipe, then.\n</think>\n\n", "[THINK]Hm.[/THINK]"]
)
def test_a_refusal_behind_a_thought_is_one(opening: str) -> None:
    assert refuses(f"{opening}I'm sorry, but I can't help with that.")
    assert not refuses(f"{opening}Take two eggs.")
    assert not refuses("<think>I'm sorry, but I can't help with that")


def test_judges_read_the_answer_behind_a_models_thought_and_nothing_else_changes() -> None:
    said = {
        ("plain", ""): " As it was written. ",
        ("thinks", ""): "<think>Seven or eight?</think>\n\nEight.",
        ("opened", "Q?<think>\n"): "Seven or eight?</think>Eight.",  # the template has opened the thought
        ("endless", ""): "<think>Seven or",
    }
    rows = [{"item_id": name, "prompt": prompt, "text": text} for (name, prompt), text in said.items()]
    generations = Generations.from_rows([{"task": "t", "sample": 0, "turn": 0, "n_tokens": 4, **row} for row in rows])
    shown = {"plain": " As it was written. ", "thinks": "Eight.", "opened": "Eight.", "endless": ""}
    assert shown_answers(generations) == {(name, 0): text for name, text in shown.items()}
    item = Instruction("thinks", "writing", ("Which number?",))
    [question] = gradings([item], generations)
    assert "Eight." in question.prompt.user and "Seven" not in question.prompt.user
