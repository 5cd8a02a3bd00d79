"""The MT-Bench judge against a real HTTP server on this machine."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlflow_compress.errors import AlignmentError, ConfigError, DataError, JudgeError
from mlflow_compress.judges import JUDGES
from mlflow_compress.judges.endpoint import EndpointConfig
from mlflow_compress.judges.grading import MtBenchConfig, MtBenchJudge
from mlflow_compress.judges.judgment_cache import JudgmentCache
from mlflow_compress.judges.mt_bench import Skipped, judge_config_from_env
from mlflow_compress.records import Generations
from tests.judge_server import judge_server

KEY = "sk-test-0123456789-secret"


@dataclass(frozen=True)
class Instruction:
    item_id: str
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] = ()


WRITING = Instruction("w", "writing", ("Write about a dog.", "Now about a cat."))
MATH = Instruction("m", "math", ("What is 2 + 2?", "Add 3."), ("4", "7"))


def answers(*items: Instruction) -> Generations:
    rows = [
        {"item_id": item.item_id, "turn": turn, "text": f"answer {turn} to {item.item_id}"}
        for item in items
        for turn in (0, 1)
    ]
    return Generations.from_rows([{"task": "t", "sample": 0, "prompt": "", "n_tokens": 4, **row} for row in rows])


def config(base_url: str, *, max_retries: int = 3, timeout: float = 20.0, **settings: Any) -> MtBenchConfig:
    endpoint = EndpointConfig(base_url=base_url, key=KEY, max_retries=max_retries, timeout=timeout)
    return MtBenchConfig(endpoint=endpoint, **settings)


def test_grades_both_turns_with_the_right_prompts() -> None:
    with judge_server(lambda _, body: f"Fine. Rating: [[{9 if 'Reference' in str(body) else 6}]]") as server:
        found = MtBenchJudge(config(server.base_url)).judge([WRITING, MATH], answers(WRITING, MATH), task="mt")
    assert found.key_rows() == [("mt", "w", 0, 0), ("mt", "w", 1, 0), ("mt", "m", 0, 0), ("mt", "m", 1, 0)]
    assert found.column("score").tolist() == [6.0, 6.0, 9.0, 9.0]
    assert found.column("category").tolist() == ["writing", "writing", "math", "math"]
    assert found.column("judge").tolist()[-1] == "gpt-4-0613 single-math-v1-multi-turn"
    assert set(server.keys) == {KEY}
    assert {(b["path"], b["model"], b["temperature"], b["max_tokens"]) for b in server.bodies} == {
        ("/v1/chat/completions", "gpt-4", 0, 2048)
    }
    users = {b["messages"][1]["content"] for b in server.bodies}
    second = next(u for u in users if "Now about a cat." in u)
    assert "Write about a dog." in second
    assert "answer 0 to w" in second
    assert "answer 1 to w" in second


def test_repeats_are_separate_questions_to_the_judge() -> None:
    with judge_server(lambda number, _: f"[[{number % 10 + 1}]]") as server:
        found = MtBenchJudge(config(server.base_url, repeats=3, concurrency=1)).judge([WRITING], answers(WRITING))
    assert len(server.bodies) == 6
    assert found.column("repeat").tolist() == [0, 1, 2, 0, 1, 2]
    assert found.column("score").tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_passing_failure_is_tried_again(status: int) -> None:
    def script(number: int, _: dict[str, Any]) -> str | tuple[int, dict[str, Any]]:
        return (status, {"error": {"message": "later"}}) if number < 2 else "[[7]]"

    with judge_server(script) as server:
        found = MtBenchJudge(config(server.base_url, concurrency=1)).judge([WRITING], answers(WRITING))
    assert found.column("score").tolist() == [7.0, 7.0]
    assert len(server.bodies) == 4


def test_a_lasting_failure_ends_in_one_clear_error() -> None:
    with (
        judge_server(lambda *_: (500, {"error": {"message": "broken"}})) as server,
        pytest.raises(JudgeError, match=r"answered HTTP 500: .*broken.*Tried 3 times") as error,
    ):
        MtBenchJudge(config(server.base_url, max_retries=2, concurrency=1)).judge([WRITING], answers(WRITING))
    assert server.base_url in str(error.value)
    assert len(server.bodies) <= 6  # two grades were planned; none is tried more than three times


def test_an_unreadable_rating_is_asked_for_again() -> None:
    with judge_server(lambda number, _: "I like it." if number == 0 else "[[4]]") as server:
        found = MtBenchJudge(config(server.base_url, concurrency=1)).judge([WRITING], answers(WRITING))
    assert found.column("score").tolist() == [4.0, 4.0]
    assert len(server.bodies) == 3


def test_a_rating_that_stays_unreadable_is_null_and_not_kept(tmp_path: Path) -> None:
    cache = tmp_path / "judgments.jsonl"
    with judge_server(lambda _, body: "No." if "Now about" in str(body) else "[[4]]") as server:
        judge = MtBenchJudge(config(server.base_url, attempts=2, concurrency=1), cache=cache)
        found = judge.judge([WRITING], answers(WRITING))
    assert found.table.column("score").to_pylist() == [4.0, None]
    assert found.column("judgment").tolist() == ["[[4]]", "No."]
    assert len(server.bodies) == 3
    assert len(cache.read_text().splitlines()) == 1


def test_an_unreachable_endpoint_is_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://user:password@127.0.0.1:{port}/v1"
    with pytest.raises(JudgeError, match="cannot be reached") as error:
        MtBenchJudge(config(url, max_retries=1)).judge([WRITING], answers(WRITING))
    assert f"http://127.0.0.1:{port}/v1" in str(error.value)
    assert "password" not in str(error.value)


def test_a_silent_endpoint_times_out() -> None:
    released = threading.Event()
    with (
        judge_server(lambda *_: "[[5]]" if released.wait(10) else "late") as server,
        pytest.raises(JudgeError, match=r"did not answer within 0.2 s. Tried 1 times"),
    ):
        try:
            settings = config(server.base_url, max_retries=0, timeout=0.2)
            MtBenchJudge(settings).judge([WRITING], answers(WRITING))
        finally:
            released.set()


def test_something_else_than_a_completion_is_an_error() -> None:
    with (
        judge_server(lambda *_: (200, {"hello": "world"})) as server,
        pytest.raises(JudgeError, match="something else than a chat completion"),
    ):
        MtBenchJudge(config(server.base_url)).judge([WRITING], answers(WRITING))


def test_the_key_never_shows(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG)
    cache = tmp_path / "judgments.jsonl"
    errors = []
    for status in (401, 403, 400, 500):
        echo = {"error": {"message": f"Incorrect API key provided: {KEY}"}}
        with judge_server(lambda *_, s=status, e=echo: (s, e)) as server, pytest.raises(JudgeError) as error:
            MtBenchJudge(config(server.base_url, max_retries=1)).judge([WRITING], answers(WRITING))
        errors.append(error.getrepr(style="long", chain=True, showlocals=False).__str__())
        assert error.value.__cause__ is None
        assert error.value.__context__ is None
        if status in (401, 403):
            assert f"refused the key (HTTP {status}). Check OPENAI_API_KEY." in str(error.value)
    with judge_server(lambda *_: f"Your key is {KEY}. [[5]]", model=KEY) as server:
        settings = config(server.base_url)
        found = MtBenchJudge(settings, cache=cache).judge([WRITING], answers(WRITING))
    assert found.column("score").tolist() == [5.0, 5.0]
    shown = [*errors, repr(settings), str(found.table.to_pylist()), cache.read_text(), caplog.text]
    assert not [text for text in shown if KEY in text]
    assert "Your key is [key]." in found.column("judgment")[0]


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    cache = tmp_path / "kept" / "judgments.jsonl"
    items = [Instruction(f"w{i}", "writing", (f"Write {i}.", "Again.")) for i in range(4)]

    healthy = False

    def script(number: int, _: dict[str, Any]) -> str | tuple[int, dict[str, Any]]:
        return f"[[{min(number + 1, 10)}]]" if number < 3 or healthy else (400, {"error": {"message": "stop"}})

    with judge_server(script) as server:
        settings = config(server.base_url, concurrency=1)
        with pytest.raises(JudgeError, match="HTTP 400"):
            MtBenchJudge(settings, cache=cache).judge(items, answers(*items))
        assert len(cache.read_text().splitlines()) == 3
        with cache.open("a") as sink:  # the process died while it wrote a line
            sink.write('{"key": "abc", "val')
        healthy, asked = True, len(server.bodies)
        found = MtBenchJudge(settings, cache=cache).judge(items, answers(*items))
        assert len(server.bodies) - asked == 5
        assert found.column("score").tolist() == [1, 2, 3, *(min(asked + n, 10) for n in range(1, 6))]
        # Everything is kept now: the next judge asks nothing, another model's judge asks everything.
        again = MtBenchJudge(settings, cache=cache).judge(items, answers(*items))
        assert again.table.equals(found.table)
        assert len(server.bodies) - asked == 5
        other = config(server.base_url, concurrency=1, model="other")
        MtBenchJudge(other, cache=cache).judge([items[0]], answers(*items))
        assert len(server.bodies) - asked == 7
    assert len(cache.read_text().splitlines()) == 10


def test_no_key_is_a_reason_not_an_error() -> None:
    for environment in ({}, {"OPENAI_API_KEY": "  "}):
        found = judge_config_from_env(environment)
        assert isinstance(found, Skipped)
        assert "OPENAI_API_KEY" in found.reason


def test_the_environment_gives_key_and_address() -> None:
    environment = {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": "http://localhost:8000/v1"}
    found = judge_config_from_env(environment, model="m", repeats=2)
    assert isinstance(found, MtBenchConfig)
    assert (found.endpoint.base_url, found.model, found.repeats) == ("http://localhost:8000/v1", "m", 2)
    named = judge_config_from_env(environment, base_url="https://judge.example/v1")
    assert isinstance(named, MtBenchConfig)
    assert named.endpoint.base_url == "https://judge.example/v1"
    default = judge_config_from_env({"OPENAI_API_KEY": KEY})
    assert isinstance(default, MtBenchConfig)
    assert default.endpoint.base_url == "https://api.openai.com/v1"


@pytest.mark.parametrize(
    "settings",
    [{"repeats": 0}, {"attempts": 0}, {"concurrency": 0}, {"max_tokens": 0}, {"model": " "}, {"timeout": 0.0}],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        config("http://localhost/v1", **settings)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host/v1", "http://", ""])
def test_a_bad_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url"):
        config(url)


def test_a_key_that_no_header_can_carry_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError) as error:
        EndpointConfig(key="sk-ümlaut")
    assert "mlaut" not in str(error.value)


def test_a_single_turn_is_graded_alone() -> None:
    one = Instruction("v", "generic", ("Who?",))
    with judge_server(lambda number, body: "Rating: [[7]]") as server:
        found = MtBenchJudge(config(server.base_url)).judge([one], answers(one).where(turn=0))
    assert [(row["turn"], row["score"]) for row in found.table.to_pylist()] == [(0, 7.0)]


def test_missing_answers_and_references_are_named() -> None:
    judge = MtBenchJudge(config("http://localhost/v1"))
    with pytest.raises(AlignmentError, match="m, turn 0"):
        judge.judge([MATH], answers(WRITING))
    bare = Instruction("m", "math", MATH.turns)
    with pytest.raises(DataError, match=r"Instruction m has no reference answers, and MT-Bench needs them for math"):
        judge.judge([bare], answers(bare))


def test_a_broken_cache_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "judgments.jsonl"
    path.write_text('{"key": "a", "value": {}}\nnot json\n{"key": "b", "value": {}}\n')
    with pytest.raises(DataError, match="Line 2"):
        MtBenchJudge(config("http://localhost/v1"), cache=path)


def test_every_judge_says_what_it_needs_and_where_it_comes_from() -> None:
    assert JUDGES.names() == ["mt_bench", "similarity"]
    for _, judge in JUDGES.items():
        assert judge.requires.endswith(".")
        assert judge.source


def test_two_processes_may_share_the_grades(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "judgments.jsonl"
    code = (
        "import sys; from pathlib import Path; from mlflow_compress.judges.judgment_cache import JudgmentCache\n"
        "cache = JudgmentCache(Path(sys.argv[1]))\n"
        "for i in range(40): cache.put(f'{sys.argv[2]}{i}', {'text': sys.argv[2] * 20_000})\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    both = [subprocess.Popen([*command, name]) for name in "ab"]
    assert [process.wait(120) for process in both] == [0, 0]
    cache = JudgmentCache(path)
    assert len(cache) == 80 and cache.get("a7") == {"text": "a" * 20_000}
    with path.open("a") as sink:  # a process that died while it wrote
        sink.write('{"key": "c", "val')
    cache.put("d", {"text": "d"})  # by a process that had the file open before
    assert len(JudgmentCache(path)) == 81
