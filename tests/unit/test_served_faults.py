"""Twenty kinds of faults of a server of models: each is asked again, counted, and refused by name when it persists."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlflow_compress.engines.endpoint.endpoint_scorer import SERVED_ANSWERS, EndpointScorer
from mlflow_compress.engines.endpoint.served_model import ServedModel
from mlflow_compress.errors import EndpointError
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.records import Request
from mlflow_compress.transport import client
from tests.judge_server import CtrlC, Raw, fault
from tests.served_demo import Fault, ServedDemo, served_demo
from tests.unit.test_endpoint_scoring import open_demo, requests_

Change = Callable[[dict[str, Any]], object]
RETRIES = 2


def reply_with(change: Change) -> Callable[[dict[str, Any]], Raw]:
    def faulty(reply: dict[str, Any]) -> Raw:
        change(reply)
        return Raw(json.dumps(reply).encode())

    return faulty


def logprobs(reply: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = reply["choices"][-1]["logprobs"]
    return found


def last(value: float | str | None) -> Callable[[dict[str, Any]], Raw]:
    """Return a reply whose last log-probability is another value."""
    return reply_with(lambda reply: logprobs(reply)["token_logprobs"].__setitem__(-1, value))


def shorten(reply: dict[str, Any]) -> None:
    tops = logprobs(reply)["top_logprobs"]
    tops[-1] = dict(list(tops[-1].items())[:3])


def contradict(reply: dict[str, Any]) -> None:
    part = logprobs(reply)
    part["top_logprobs"][-1][part["tokens"][-1]] = part["token_logprobs"][-1] - 1


def inflate(reply: dict[str, Any]) -> None:
    part = logprobs(reply)
    for tops in filter(None, part["top_logprobs"]):
        tops |= dict.fromkeys(tops, -0.5)
    part["token_logprobs"] = [None if value is None else -0.5 for value in part["token_logprobs"]]


def poison(reply: dict[str, Any]) -> None:
    top = logprobs(reply)["top_logprobs"][-1]
    top[min(top)] = math.nan


KINDS: dict[str, tuple[str, Callable[[dict[str, Any]], Raw]]] = {
    "429 with Retry-After": ("http_429", lambda _: fault("rate_limit", "")),
    "429 without": ("http_429", lambda _: Raw(b'{"error": {"message": "slow down"}}', 429)),
    "500": ("http_500", lambda _: fault("server_error", "")),
    "503 of a proxy": ("http_503", lambda _: Raw(b"<html>no upstream</html>", 503, kind="text/html")),
    "truncated JSON": ("not_json", lambda reply: Raw(json.dumps(reply).encode()[:-20])),
    "truncated body": ("connection", lambda reply: Raw(json.dumps(reply).encode(), cut=20)),
    "HTML": ("not_json", lambda _: fault("html", "")),
    "empty body": ("not_json", lambda _: Raw()),
    "closed connection": ("connection", lambda _: fault("dropped", "")),
    "slow": ("timeout", lambda _: fault("timeout", "")),
    "null": ("null", last(None)),
    "NaN": ("not_finite", last(math.nan)),
    "NaN in a list": ("not_finite", reply_with(poison)),
    "infinite": ("not_finite", last(-math.inf)),
    "a word": ("not_a_completion", last("unlikely")),
    "above zero": ("above_zero", last(0.7)),
    "too probable together": ("above_one", reply_with(inflate)),
    "list against token": ("contradiction", reply_with(contradict)),
    "short list": ("short_list", reply_with(shorten)),
    "no lists": ("short_list", reply_with(lambda reply: logprobs(reply).update(top_logprobs=None))),
    "no log-probabilities": ("not_a_completion", reply_with(lambda reply: reply["choices"][-1].update(logprobs=None))),
    "a completion less": ("not_a_completion", reply_with(lambda reply: reply["choices"].pop())),
    "other model": ("other_model", reply_with(lambda reply: reply.update(model="another"))),
    "tokens counted otherwise": ("other_tokens", reply_with(lambda reply: reply["usage"].update(prompt_tokens=1))),
    "tokens echoed otherwise": (
        "other_tokens",
        reply_with(lambda reply: logprobs(reply)["tokens"].__setitem__(0, "token_id:7")),
    ),
}


@pytest.fixture(scope="module")
def opened(loaded: LoadedModel) -> Iterator[tuple[ServedDemo, ServedModel, list[float]]]:
    """A server that echoes, its model asked one request at a time, and the right log-likelihoods."""
    with served_demo(loaded, by_position=False) as server:
        served = open_demo(server, loaded, max_retries=RETRIES, concurrency=1)
        exact, _ = EndpointScorer(served).score(requests_())
        yield server, served, exact.column("loglik").tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_asked_again_and_refused_by_name_when_it_persists(
    kind: str, opened: tuple[ServedDemo, ServedModel, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_FIRST_WAIT", 0.001)
    server, served, exact = opened
    reason, faulty = KINDS[kind]
    echoes_alone = kind == "tokens echoed otherwise"  # of a next token nothing is echoed
    injected: Counter[str] = Counter()
    begin = len(server.bodies)

    def inject(number: int, body: dict[str, Any]) -> Raw | None:
        if number - begin not in due or (echoes_alone and "echo" not in body):
            return None
        injected[reason] += 1
        return faulty(server.answer("/v1/completions", body))

    try:
        # Every request fails once: the figures are right, and the faults counted by kind.
        due = [0, 2, 4, 6, 8, 10, 12, 14]
        server.fault = inject
        scorer = EndpointScorer(served)
        scores, _ = scorer.score(requests_(), resume=tmp_path / "passing")
        assert scores.column("loglik").tolist() == exact
        assert scorer.report is not None and injected[reason] > 0
        assert scorer.report.asked_again == dict(injected)
        assert len(server.bodies) - begin == scorer.report.n_asked + injected[reason] <= 15
        n = scorer.report.n_asked

        # It does not pass: an error names the kind, and what is kept; nothing with a fault is.
        injected.clear()
        begin = len(server.bodies)
        due = list(range(0 if echoes_alone else 2, 12))  # the first request is the only one with echoes
        with pytest.raises(EndpointError) as error:
            EndpointScorer(served).score(requests_(), resume=tmp_path / "persisting")
        n_kept = len(server.bodies) - begin - (RETRIES + 1)
        assert f"({reason} 1)" in str(error.value) and f"Tried {RETRIES + 1} times" in str(error.value)
        assert f"{n_kept} of " in str(error.value) and "the same command asks only for the rest" in str(error.value)
        assert len(str(error.value)) < 600 and injected[reason] == RETRIES + 1
    finally:
        server.fault = lambda number, body: None

    # The healthy server goes on from there, and gives the right figures.
    begin = len(server.bodies)
    scorer = EndpointScorer(served)
    scores, _ = scorer.score(requests_(), resume=tmp_path / "persisting")
    assert scores.column("loglik").tolist() == exact
    assert len(server.bodies) - begin == n - n_kept
    assert scorer.report is not None and scorer.report.asked_again == {} and scorer.report.n_unscored == 0


def written(reply: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = reply["completion_probabilities"][0]
    return found


# Of llama.cpp's own route
LLAMA_CPP: dict[str, tuple[str, Change]] = {
    "NaN": ("not_finite", lambda reply: written(reply).update(logprob=math.nan)),
    "null": ("null", lambda reply: written(reply).update(logprob=None)),
    "above zero": ("above_zero", lambda reply: written(reply).update(logprob=0.7)),
    "short list": ("short_list", lambda reply: written(reply)["top_logprobs"].pop()),
    "too probable together": (
        "above_one",
        lambda reply: [row.update(logprob=-0.5) for row in written(reply)["top_logprobs"]],
    ),
    "nothing written": ("not_a_completion", lambda reply: reply["completion_probabilities"].clear()),
    "other model": ("other_model", lambda reply: reply.update(model="another")),
    "prompt cut": ("other_tokens", lambda reply: reply.update(truncated=True)),
    "a prompt of other tokens": ("other_tokens", lambda reply: reply.update(tokens_evaluated=2)),
}


def at_last(reply: dict[str, Any]) -> dict[str, Any]:
    """Return the log-probabilities at the last position of a prompt."""
    found: dict[str, Any] = reply["choices"][-1]["prompt_logprobs"][-1]
    return found


# Of vLLM's log-probabilities by position
BY_POSITION: dict[str, tuple[str, Change]] = {
    "NaN": ("not_finite", lambda reply: min(at_last(reply).values(), key=id).update(logprob=math.nan)),
    "null": ("null", lambda reply: min(at_last(reply).values(), key=id).update(logprob=None)),
    "short list": ("short_list", lambda reply: [at_last(reply).pop(token) for token in list(at_last(reply))[:5]]),
    "a position less": ("not_a_completion", lambda reply: reply["choices"][-1]["prompt_logprobs"].pop()),
    "other tokens": ("not_a_completion", lambda reply: reply["choices"][-1]["prompt_token_ids"].__setitem__(-1, 7)),
    "a prompt less": ("not_a_completion", lambda reply: reply["choices"].pop()),
}
FORMS = {"llama.cpp": (LLAMA_CPP, 2), "vllm": (BY_POSITION, 0)}  # The first echo of vLLM is the only one


@pytest.mark.parametrize(("form", "kind"), [(form, kind) for form, (kinds, _) in FORMS.items() for kind in kinds])
def test_a_fault_of_another_form_is_asked_again_and_refused_by_name_when_it_persists(
    form: str, kind: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_FIRST_WAIT", 0.001)
    kinds, first = FORMS[form]
    reason, change = kinds[kind]
    with served_demo(loaded, kind=form) as server:
        served = open_demo(server, loaded, max_retries=1, concurrency=1)
        exact, _ = EndpointScorer(served).score(requests_())

        def failing(n: int) -> Fault:
            due = range(len(server.bodies) + first, len(server.bodies) + first + n)

            def inject(number: int, body: dict[str, Any]) -> Raw | None:
                if number not in due:
                    return None
                reply = server.native(body) if form == "llama.cpp" else server.completion(body)
                change(reply)
                return Raw(json.dumps(reply).encode())

            return inject

        server.fault = failing(1)
        scorer = EndpointScorer(served)
        scores, _ = scorer.score(requests_())
        assert scores.column("loglik").tolist() == exact.column("loglik").tolist()
        assert scorer.report is not None and scorer.report.asked_again == {reason: 1}
        server.fault = failing(2)
        # Where nothing was answered before, a reply of another kind may come from another address.
        with pytest.raises(EndpointError, match=rf"\({reason} 1\).*Tried 2 times|it often ends in /v1"):
            EndpointScorer(served).score(requests_())


def test_a_refused_key_ends_it_at_once_and_midway_with_what_is_kept(
    opened: tuple[ServedDemo, ServedModel, list[float]], loaded: LoadedModel, tmp_path: Path
) -> None:
    server, served, exact = opened
    refusal = Raw(b'{"error": {"message": "who is there?"}}', 401)
    try:
        server.fault = lambda number, body: refusal
        begin = len(server.bodies)
        with pytest.raises(EndpointError, match=r"refused the key \(HTTP 401\). Check ENDPOINT_API_KEY"):
            open_demo(server, loaded)
        assert len(server.bodies) == begin + 1
        server.fault = lambda number, body: refusal if number >= begin + 4 else None
        said = r"refused the key \(HTTP 401\).*The answers to 3 of \d are saved: the same command"
        with pytest.raises(EndpointError, match=said):
            EndpointScorer(served).score(requests_(), resume=tmp_path)
        assert len(server.bodies) == begin + 5
    finally:
        server.fault = lambda number, body: None
    begin = len(server.bodies)
    scorer = EndpointScorer(served)
    scores, _ = scorer.score(requests_(), resume=tmp_path)
    assert scores.column("loglik").tolist() == exact
    assert scorer.report is not None and len(server.bodies) - begin == scorer.report.n_asked - 3


def test_a_broken_server_is_not_asked_for_everything_first(
    opened: tuple[ServedDemo, ServedModel, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_FIRST_WAIT", 0.001)
    server, served, _ = opened
    served = replace(served, endpoint=replace(served.endpoint, concurrency=2))
    begin = len(server.bodies)
    server.fault = lambda number, body: fault("server_error", "")
    try:
        with pytest.raises(EndpointError, match=r"\(http_500 [23]\)"):
            EndpointScorer(served).score(requests_(), resume=tmp_path)
    finally:
        server.fault = lambda number, body: None
    assert len(server.bodies) - begin <= 3 * (RETRIES + 1)  # of 6 requests


def test_a_model_that_is_served_under_another_name_is_refused_when_it_is_opened(loaded: LoadedModel) -> None:
    with served_demo(loaded) as server:

        def other(number: int, body: dict[str, Any]) -> Raw | None:
            reply = server.answer("/v1/completions", body)
            return Raw(json.dumps({**reply, "model": "another"}).encode()) if isinstance(reply, dict) else None

        server.fault = other
        with pytest.raises(EndpointError, match="answered as the model 'another', where 'demo-served' was asked for"):
            open_demo(server, loaded, max_retries=0)


def in_request(body: dict[str, Any]) -> list[str]:
    """Return the prompts of a request, and what is asked of each."""
    prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
    return [json.dumps({**body, "prompt": prompt}) for prompt in prompts]


def many(kind: str) -> list[Request]:
    """Requests of eight or more: options that share requests, options that do not, and letters with two rounds."""
    if kind == "letters":  # 40 prompts, and for the letters that no list shows 40 echoes
        ways = [
            (f"Question {n}: which?\nA. one\nB. two\nAnswer:", " ABCD"[o], o) for n in range(40) for o in range(1, 5)
        ]
    else:
        words = (" a small even number", " the name of a river in the north")
        ways = [(f"The number {n} is", words[o], o) for n in range(80 if kind == "packs" else 8) for o in range(2)]
    return [Request(kind, prompt, 0, o, o, prompt, option, len(option), len(option)) for prompt, option, o in ways]


@pytest.mark.parametrize("kind", ["packs", "alone", "letters"])
@pytest.mark.usefixtures("command_signals")
def test_an_interruption_asks_nothing_again_that_was_under_way(
    kind: str,
    opened: tuple[ServedDemo, ServedModel, list[float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, served, _ = opened
    requests, concurrency = many(kind), 4
    served = replace(served, endpoint=replace(served.endpoint, concurrency=concurrency))
    served = replace(served, can=replace(served.can, lists=kind != "alone"))
    exact, _ = EndpointScorer(served).score(requests)
    begin, ctrl_c = len(server.bodies), CtrlC(monkeypatch)
    server.fault = lambda number, body: ctrl_c.press() if number - begin >= 3 else None
    try:
        with pytest.raises(KeyboardInterrupt):
            EndpointScorer(served).score(requests, resume=tmp_path)
    finally:
        server.fault = lambda number, body: None
    n_sent = len(server.bodies) - begin
    scorer = EndpointScorer(served)
    scores, _ = scorer.score(requests, resume=tmp_path)
    assert np.allclose(scores.column("loglik").tolist(), exact.column("loglik").tolist())
    assert scorer.report is not None and 4 <= n_sent < scorer.report.n_asked
    assert len(server.bodies) - begin == scorer.report.n_asked  # those under way were kept: none was asked twice
    prompts = [prompt for body in server.bodies[begin:] for prompt in in_request(body)]
    assert len(prompts) == len(set(prompts))
    if kind == "packs":  # 16 prompts a request: none was asked by itself afterwards
        assert {len(in_request(body)) for body in server.bodies[begin:]} == {16}

    # Killed while an answer was written: what is whole on disk is kept, and only the rest is asked for.
    journal = tmp_path / SERVED_ANSWERS
    kept = journal.read_bytes().splitlines(keepends=True)[:21]
    journal.write_bytes(b"".join(kept) + b'{"key": "torn')
    begin = len(server.bodies)
    again, _ = EndpointScorer(served).score(requests, resume=tmp_path)
    assert np.allclose(again.column("loglik").tolist(), exact.column("loglik").tolist())
    assert sum(len(in_request(body)) for body in server.bodies[begin:]) == len(prompts) - len(kept)
