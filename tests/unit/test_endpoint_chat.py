"""Conversations sent to a server: as chat completions where its template reads as ours, otherwise as completions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlflow_compress.engines.endpoint.served_model import ServedModel
from mlflow_compress.engines.endpoint.server_probe import ChatWanted, open_served_model
from mlflow_compress.errors import EndpointError
from mlflow_compress.items.sources.instructions import Instruction
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.reasoning import parted, stays_in_thought
from mlflow_compress.records import Generations
from mlflow_compress.scoring.generation.generate import generate_two_turns, generate_until
from mlflow_compress.scoring.generation.generation_rows import GenerationConfig
from mlflow_compress.transport import client
from mlflow_compress.transport.endpoint import EndpointConfig
from tests.judge_server import Raw
from tests.served_demo import NAME, Fault, ServedDemo, served_demo

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PATH = {"auto": CHAT, "false": TEXT}
GREEDY = GenerationConfig(max_new_tokens=6, temperature=0.0, samples=1, top_k=0, top_p=1.0)
ASKED = [Instruction(item_id=str(i), category="c", turns=(f"Tell me about {i} rivers.", "Why?")) for i in range(3)]


def opened(server: ServedDemo, loaded: LoadedModel, chat: ChatWanted = "auto", retries: int = 2) -> ServedModel:
    endpoint = EndpointConfig(base_url=server.base_url, key="none", max_retries=retries, error=EndpointError)
    return open_served_model(endpoint, NAME, loaded, chat=chat)


def paths(server: ServedDemo, begin: int) -> set[str]:
    return {body["path"] for body in server.bodies[begin:]}


def test_both_routes_write_what_this_process_writes(loaded: LoadedModel) -> None:
    here = generate_two_turns(loaded, ASKED, GREEDY, system="Be brief.").column("text").tolist()
    with served_demo(loaded, chat="") as server:
        for wanted, route in (("false", TEXT), ("auto", CHAT)):
            model = opened(server, loaded, wanted)  # type: ignore[arg-type]
            begin = len(server.bodies)
            there = generate_two_turns(model, ASKED, GREEDY, system="Be brief.")
            assert there.column("text").tolist() == here and paths(server, begin) == {route}
        # GSM8K's prompts with worked examples are texts: a template around them would be another question.
        begin = len(server.bodies)
        generate_until(model, ["Question: 2 + 2? Answer:"], max_new_tokens=3)
        assert model.can.chat and paths(server, begin) == {TEXT}
    asked = [body["messages"] for body in server.bodies if body["path"] == CHAT and "max_tokens" in body]
    roles = [[message["role"] for message in messages] for messages in asked[1:]]
    assert roles == [["system", "user"]] * 3 + [["system", "user", "assistant", "user"]] * 3
    assert any(here)


def test_a_template_that_reads_otherwise_is_not_used_unless_it_is_wanted(loaded: LoadedModel) -> None:
    with served_demo(loaded, chat="You are a poet. ") as server:
        model, wanted = opened(server, loaded), opened(server, loaded, "true")
    assert not model.can.chat and "the server's chat template makes" in model.can.answers
    assert wanted.can.chat and "which is not ours" in wanted.can.answers
    assert f"conversations {model.can.answers}" in model.can.lines(NAME)


def test_a_server_without_chat_is_asked_for_completions(loaded: LoadedModel) -> None:
    with served_demo(loaded) as server:
        model = opened(server, loaded)
        assert not model.can.chat and "gives no chat completions" in model.can.answers
        begin = len(server.bodies)
        generate_two_turns(model, ASKED[:1], GREEDY, turns=1)
        assert paths(server, begin) == {TEXT}
        with pytest.raises(EndpointError, match="gives no chat completions"):
            opened(server, loaded, "true")


def test_what_was_answered_is_not_asked_again_after_a_failure(loaded: LoadedModel, tmp_path: Path) -> None:
    def generated(model: ServedModel) -> Generations:
        return generate_two_turns(model, ASKED, GREEDY, resume=tmp_path / "answers")

    here = generate_two_turns(loaded, ASKED, GREEDY).column("text").tolist()
    with served_demo(loaded, chat="") as server:
        model = opened(server, loaded, retries=0)

        def second_turn_fails(number: int, body: dict[str, object]) -> Raw | None:
            messages = body.get("messages")
            return Raw(b"{}", 503) if isinstance(messages, list) and len(messages) > 1 else None

        server.fault = second_turn_fails
        with pytest.raises(EndpointError, match="Earlier answers are saved"):
            generated(model)
        server.fault = lambda number, body: None
        begin = len(server.bodies)
        assert generated(model).column("text").tolist() == here
    assert len(server.bodies) - begin == 3  # the second turns alone


def test_a_faulty_chat_server_is_asked_again(loaded: LoadedModel) -> None:
    here = generate_two_turns(loaded, ASKED, GREEDY, turns=1).column("text").tolist()
    with served_demo(loaded, chat="") as server:
        model = opened(server, loaded)
        begin = len(server.bodies)
        faults = {
            begin: Raw(b"{}", 429, {"Retry-After": "0"}),
            begin + 1: Raw(b'{"choices": [{"mess'),
            begin + 2: Raw(status=0),
        }
        server.fault = lambda number, body: faults.get(number)
        assert generate_two_turns(model, ASKED, GREEDY, turns=1).column("text").tolist() == here
        assert len(server.bodies) - begin == 6


def finishing(how: str, tokens: int = 6) -> Callable[[dict[str, Any]], None]:
    def change(reply: dict[str, Any]) -> None:
        reply["choices"][0]["finish_reason"] = how
        reply["usage"]["completion_tokens"] = tokens

    return change


# What is no whole answer of the model to the prompt that was sent -> how the error says so
NOT_WHOLE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "other model": (lambda reply: reply.update(model="another"), "answered as the model 'another'"),
    "cut by the server": (finishing("length", 2), "cut an answer at 2 tokens, where 6 were asked for"),
    "filtered": (finishing("content_filter"), "ended an answer with 'content_filter'"),
    "aborted": (finishing("abort"), "ended an answer with 'abort'"),
    "prompt cut to a shorter context": (
        lambda reply: reply["usage"].update(prompt_tokens=3),
        r"read 3 tokens of a prompt, where \d+ were sent",
    ),
    "no text": (lambda reply: reply["choices"][0].update(text=None, message={"content": 7}), "answered no text"),
}


@pytest.mark.parametrize("wanted", ["auto", "false"])
def test_an_answer_is_whole_and_of_the_model_and_prompt_that_were_asked_or_an_error(
    wanted: ChatWanted, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_FIRST_WAIT", 0.001)
    here = generate_two_turns(loaded, ASKED, GREEDY, turns=1).column("text").tolist()
    with served_demo(loaded, chat="") as server:
        model = opened(server, loaded, wanted, retries=1)

        def failing(change: Callable[[dict[str, Any]], object], n: int) -> Fault:
            due = range(len(server.bodies), len(server.bodies) + n)

            def faulty(number: int, body: dict[str, Any]) -> Raw | None:
                if number not in due:
                    return None
                reply = server.answer(PATH[wanted], body)
                change(reply)
                return Raw(json.dumps(reply).encode())

            return faulty

        for kind, (change, said) in NOT_WHOLE.items():
            server.fault = failing(change, 1)  # it passes
            assert generate_two_turns(model, ASKED, GREEDY, turns=1).column("text").tolist() == here, kind
            server.fault = failing(change, 100)
            with pytest.raises(EndpointError, match=said):
                generate_two_turns(model, ASKED, GREEDY, turns=1)


def test_a_template_of_the_servers_own_may_read_fewer_tokens_where_it_was_wanted(loaded: LoadedModel) -> None:
    with served_demo(loaded, chat="You are a poet. ") as server:
        model = opened(server, loaded, "true", retries=0)

        def shorter(number: int, body: dict[str, Any]) -> Raw:
            reply = server.answer(CHAT, body)
            reply["usage"]["prompt_tokens"] = 3
            return Raw(json.dumps(reply).encode())

        server.fault = shorter
        assert len(generate_two_turns(model, ASKED, GREEDY, turns=1)) == 3


@pytest.mark.parametrize(
    ("message", "finish", "text"),
    [
        ({"content": "7", "reasoning_content": "3 and 4"}, "stop", "<think>3 and 4</think>7"),
        ({"content": "7", "reasoning": "3 and 4"}, "stop", "<think>3 and 4</think>7"),
        ({"content": None, "reasoning_content": "3 and"}, "length", "<think>3 and"),
        ({"content": "", "reasoning": "3 and 4"}, "stop", "<think>3 and 4</think>"),
        ({"content": "7", "reasoning_content": None}, "stop", "7"),
        ({"content": None}, "stop", ""),
        (
            {"content": [{"type": "thinking", "thinking": "3 and 4"}, {"type": "text", "text": "7"}]},
            "stop",
            "<think>3 and 4</think>7",
        ),
    ],
)
def test_a_thought_that_a_server_gives_apart_stands_before_the_answer(
    message: dict[str, Any], finish: str, text: str, loaded: LoadedModel
) -> None:
    with served_demo(loaded, chat="") as server:
        model = opened(server, loaded)

        def thinking(number: int, body: dict[str, Any]) -> Raw:
            reply = server.answer(CHAT, body)
            reply["choices"] = [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}]
            reply["usage"]["completion_tokens"] = GREEDY.max_new_tokens
            return Raw(json.dumps(reply).encode())

        server.fault = thinking
        [row] = generate_two_turns(model, ASKED[:1], GREEDY, turns=1).table.to_pylist()
    assert row["text"] == text
    assert row["n_tokens"] == len(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])
    opened_in, answer = parted("q", row["text"])
    assert (answer == "7") == text.endswith("7") and stays_in_thought("q", row["text"]) == (finish == "length")
    assert opened_in + answer == text
