"""Whatever a judge's endpoint answers: figures of all judgments, an error, or a first line that says what lacks."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

import mlflow_compress as mc
from mlflow_compress.transport import client
from tests.conftest import Fork, forked_checks
from tests.judge_server import PAID, PASSING, Answer, Raw, completion, fault, judge_server, question_of
from tests.judging import KEY

MODEL = "judge-1"
FEW = {"answer_args": {"num_samples": 2, "max_new_tokens": 8, "judge_max_tokens": "8"}, "judge_model": MODEL}
ONCE = {"attempts": 1, "max_unscored": 1.0, "max_retries": 1}
Reply = Callable[[str], Answer]
"""From the healthy text to what the endpoint answers instead."""


def healthy(body: dict[str, Any]) -> str:
    """Return a rating, or a verdict where one is asked for: always the same of one question."""
    number = int(question_of(body), 16)
    if "[[C]]" in body["messages"][0]["content"]:
        return f"Compared. [[{'ABC'[number % 3]}]]"
    return f"Good. Rating: [[{number % 10 + 1}]]"


def reply(text: str | None, **more: Any) -> Reply:
    return lambda _: (200, completion(text, MODEL, **more))


def changed(change: Callable[[dict[str, Any]], object]) -> Reply:
    """Return the healthy completion with a change."""

    def faulty(text: str) -> Answer:
        body = completion(text, MODEL)
        change(body)
        return 200, body

    return faulty


def choice(**values: Any) -> Reply:
    return changed(lambda body: body["choices"][0].update(values))


# What the endpoint gives to the questions about one instruction -> why they have no rating; "" where they have one
LASTING: dict[str, tuple[Reply, str]] = {
    "text in parts": (lambda text: (200, completion([{"type": "text", "text": text}], MODEL)), ""),  # type: ignore[arg-type]
    "no name of a model": (changed(lambda body: body.pop("model")), ""),
    "a rating twice": (lambda text: f"{text}\n{text}", ""),
    "another choice behind it": (changed(lambda body: body["choices"].append(body["choices"][0])), ""),
    "cut behind the rating": (choice(finish_reason="length"), ""),
    "empty": (reply(""), "empty"),
    "null": (reply(None), "empty"),
    "thoughts alone": (reply(None, reasoning_content="[[8]]"), "empty"),
    "cut before the rating": (reply("It is g", finish="length"), "length"),
    "a refusal": (reply(None, refusal="I will not."), "refusal"),
    "a filter": (reply("[[8]]", finish="content_filter"), "content_filter"),
    "no rating": (reply("Rating: eight"), "no_rating"),
    "half a rating": (reply("Rating: [[8"), "no_rating"),
    "a rating of a hundred": (reply("Rating: [[85/100]]"), "no_rating"),
    "out of range": (reply("Rating: [[11]] [[11]]"), "out_of_range"),
    "two ratings": (reply("[[3]] or [[8]], [[A]] or [[B]]"), "ambiguous"),
    "no choices": (changed(lambda body: body["choices"].clear()), "no_choices"),
    "a message as text": (choice(message="[[8]]"), "no_choices"),
    "an error inside": (lambda _: (200, {"error": {"message": "busy"}}), "error_inside"),
    "another kind of JSON": (lambda _: (200, {"answer": "[[8]]"}), "not_a_completion"),
    "HTML": (lambda _: fault("html", ""), "not_json"),
    "a truncated body": (lambda text: Raw(json.dumps(completion(text, MODEL)).encode(), cut=9), "connection"),
    "400": (lambda _: (400, {"error": {"message": "no"}}), "http_400"),
    "500": (lambda _: (500, {"error": {"message": "no"}}), "http_500"),
}


N = len(LASTING)


@dataclass
class Script:
    """Answers as the healthy judge, but for the questions of some instructions, by the number in their text."""

    instead: Mapping[int, Reply] = field(default_factory=dict)
    passing: bool = False  # Once, and then the healthy answer
    seen: set[str] = field(default_factory=set)

    def __call__(self, number: int, body: dict[str, Any]) -> Answer:
        """Answer one call."""
        text, question = healthy(body), question_of(body)
        [day] = set(re.findall(r"day (\d+)", str(body["messages"])))
        if int(day) not in self.instead or (self.passing and question in self.seen):
            return completed(text)
        self.seen.add(question)
        return self.instead[int(day)](text)


def completed(text: str) -> Answer:
    return 200, completion(text, MODEL)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory, python: Fork) -> Iterator[Callable[..., mc.AnswerEvaluation]]:
    """Judge one variant's answers by a script, to one instruction for each kind of reply; every call asks anew."""
    folder = tmp_path_factory.mktemp("judged")
    says = [{"question_id": i, "category": "writing", "turns": [f"Tell of day {i}."]} for i in range(N)]
    (folder / "say.jsonl").write_text("".join(json.dumps(row) + "\n" for row in says))
    with forked_checks(python):
        variant = mc.compress("demo", "rtn", bits=3, store=folder / "results")

    def judge(script: Callable[[int, dict[str, Any]], Answer], **settings: Any) -> mc.AnswerEvaluation:
        for kept in folder.rglob("judgments.jsonl"):
            kept.unlink()
        with judge_server(script, model=MODEL) as server:
            asked = {"judges": "mt_bench,pairwise", **FEW, "judge_args": {"base_url": server.base_url, **settings}}
            return mc.judge(variant, instructions=folder / "say.jsonl", store=folder / "results", **asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", KEY)
        yield judge


def scores(found: mc.AnswerEvaluation) -> dict[tuple[str, str, int], tuple[float | None, str | None]]:
    """Return score and reason of every judgment of the variant."""
    judgments = found.records().judgments
    return {
        (row["item_id"], row["task"], row["repeat"]): (row["score"], row["reason"])
        for row in judgments.table.to_pylist()
    }


@pytest.fixture(scope="module")
def right(judged: Callable[..., mc.AnswerEvaluation]) -> mc.AnswerEvaluation:
    """What a healthy endpoint gives."""
    found = judged(Script())
    assert found.as_text().splitlines()[0] == f"Judgments: {4 * N}, all with a rating"
    assert f": Judgments: {4 * N}, all with a rating; " in found.summary
    return found


def test_a_figure_is_of_all_judgments_or_the_first_line_says_what_lacks(
    judged: Callable[..., mc.AnswerEvaluation], right: mc.AnswerEvaluation
) -> None:
    found = judged(Script({day: instead for day, (instead, _) in enumerate(LASTING.values())}), **ONCE)
    lacks: Counter[str] = Counter()
    there, exact = scores(found), scores(right)
    for day, (kind, (_, reason)) in enumerate(LASTING.items()):
        # The grade, and the comparison in both orders: a comparison knows no range.
        reasons = {"mt_bench": reason, "pairwise": "no_rating" if reason == "out_of_range" else reason}
        for key in [key for key in there if key[0] == str(day)]:
            wanted = reasons[key[1]]
            assert there[key] == ((None, wanted) if wanted else exact[key]), kind
        if reason:
            lacks[reasons["mt_bench"]] += 2  # of baseline and variant
            lacks[reasons["pairwise"]] += 2
    first = found.as_text().splitlines()[0]
    said, _, listed = first.partition(" of them without a rating: ")
    assert said == f"Judgments: {4 * N}, {lacks.total()}"
    assert {reason: int(n) for n, reason in (part.split() for part in listed.split(", "))} == lacks
    assert first in found.summary
    n_lacking = sum(bool(reason) for _, reason in LASTING.values())
    for name in ("judge/mt_bench", "judge/mt_bench_baseline"):
        assert (found[name].n, found[name].n_unscored) == (N - n_lacking, n_lacking)
    assert found["judge/mt_bench_delta"].n == N - n_lacking


def test_what_passes_changes_no_figure(
    judged: Callable[..., mc.AnswerEvaluation], right: mc.AnswerEvaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_FIRST_WAIT", 0.001)
    faults = {day: partial(fault, kind) for day, kind in enumerate((*PASSING, *PAID))}
    script = Script(faults, passing=True)
    found = judged(script)
    assert len(script.seen) == 4 * len(faults)
    assert scores(found) == scores(right)
    assert found.as_text().splitlines()[0] == right.as_text().splitlines()[0]


# What ends the stage -> how the error says so
ENDING: dict[str, tuple[Callable[[int, dict[str, Any]], Answer], dict[str, Any], str]] = {
    "another model answers now and then": (
        lambda number, body: (200, completion(healthy(body), "other" if number % 3 == 0 else MODEL)),
        {},
        rf"{MODEL} was answered by {MODEL} \(\d+\) and other \(\d+\): their ratings do not come from one judge",
    ),
    "too many without a rating": (
        Script({1: reply(""), 2: reply("")}),
        {"attempts": 1},
        r"mt_bench: 4 of \d+ judgments have no rating: 4 empty. That is more than judge_args: max_unscored=0.05",
    ),
    "a key that is withdrawn": (
        lambda number, body: completed(healthy(body)) if number < 3 else (401, {"error": {"message": "no"}}),
        {},
        "refused the key",
    ),
    "an endpoint that is away": (lambda number, body: Raw(status=0), ONCE, "cannot be reached"),
}


@pytest.mark.parametrize("kind", ENDING)
def test_what_ends_the_stage_is_an_error_with_its_account(
    kind: str, judged: Callable[..., mc.AnswerEvaluation]
) -> None:
    script, settings, said = ENDING[kind]
    with pytest.raises(mc.MlflowCompressError, match=f"(?s){said}.*Account: ") as error:
        judged(script, **settings)
    assert len(str(error.value)) < 1000
