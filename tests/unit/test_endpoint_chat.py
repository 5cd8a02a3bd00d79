"""Conversations sent to a server: as chat completions where its template reads as ours, otherwise as completions."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlflow_compress.engines.endpoint.served_model import ServedModel
from mlflow_compress.engines.endpoint.server_probe import ChatWanted, open_served_model
from mlflow_compress.errors import EndpointError
from mlflow_compress.items.sources.instructions import Instruction
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.records import Generations
from mlflow_compress.scoring.generation.generate import generate_two_turns, generate_until
from mlflow_compress.scoring.generation.generation_rows import GenerationConfig
from mlflow_compress.transport.endpoint import EndpointConfig
from tests.judge_server import Raw
from tests.served_demo import NAME, ServedDemo, served_demo

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
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
        for wanted, route in (("auto", CHAT), ("false", TEXT)):
            model = opened(server, loaded, wanted)  # type: ignore[arg-type]
            begin = len(server.bodies)
            there = generate_two_turns(model, ASKED, GREEDY, system="Be brief.")
            assert there.column("text").tolist() == here and paths(server, begin) == {route}
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


def test_texts_that_are_no_conversations_stay_completions(loaded: LoadedModel) -> None:
    """GSM8K's prompts with worked examples are texts: a template around them would be another question."""
    with served_demo(loaded, chat="") as server:
        model = opened(server, loaded)
        begin = len(server.bodies)
        generate_until(model, ["Question: 2 + 2? Answer:"], max_new_tokens=3)
        assert model.can.chat and paths(server, begin) == {TEXT}


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
        with pytest.raises(EndpointError, match="What was answered before is kept"):
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
