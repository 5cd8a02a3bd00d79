"""The MT-Bench judge against a real HTTP server on this machine.

Several judge models and repeats through the judge, and the page's row of the noise floor.
"""

import json
import logging
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pydantic
import pytest

from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.errors import AlignmentError, ConfigError, DataError, JudgeError
from mlflow_compress.judges import JUDGES, Judge, Judged, JudgeInputs, chosen_judges
from mlflow_compress.judges import open_judge as opened
from mlflow_compress.judges.asking import KEPT_FIELDS, gradings
from mlflow_compress.judges.session import endpoint_from
from mlflow_compress.metrics import MetricInputs, compute_all, headline
from mlflow_compress.records import RunRecords
from mlflow_compress.reporting.headline import headline_rows
from mlflow_compress.transport.endpoint import EndpointConfig, check_address, without_password
from mlflow_compress.transport.replies import ReplyCache
from tests.judge_server import Raw, completion, judge_server
from tests.judging import KEY, MATH, WRITING, Instruction, answers, grade, graded, instructions, open_judge

ONE = {"judge_concurrency": 1}


def scores(judged: Any) -> list[float | None]:
    return judged.judgments["variant"].table.column("score").to_pylist()  # type: ignore[no-any-return]


def reasons(judged: Any) -> list[str | None]:
    return judged.judgments["variant"].table.column("reason").to_pylist()  # type: ignore[no-any-return]


def test_grades_both_turns_with_the_right_prompts(tmp_path: Path) -> None:
    with judge_server(lambda _, body: f"Fine. Rating: [[{9 if 'Reference' in str(body) else 6}]]") as server:
        judged = grade(server.base_url, tmp_path, WRITING, MATH)
    found = judged.judgments["variant"]
    assert found.key_rows() == [(("mt_bench", i, t, 0)) for i in "wm" for t in (0, 1)]
    assert scores(judged) == [6.0, 6.0, 9.0, 9.0]
    assert reasons(judged) == [None] * 4
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
    assert judged.parameters == {
        "judge_model": "gpt-4",
        "judge_answered_by": "gpt-4-0613",
        "judge_sent": "temperature=0, max_tokens=2048",
    }


def test_repeats_are_separate_questions_to_the_judge(tmp_path: Path) -> None:
    judged, server = graded(lambda number, _: f"[[{number % 10 + 1}]]", tmp_path, WRITING, judge_repeats=3, **ONE)
    assert len(server.bodies) == 6
    assert judged.judgments["variant"].column("repeat").tolist() == [0, 1, 2, 0, 1, 2]
    assert scores(judged) == [1, 2, 3, 4, 5, 6]


def test_equal_answers_of_both_models_are_graded_once(tmp_path: Path) -> None:
    same = {"baseline": answers(WRITING), "variant": answers(WRITING)}
    judged, server = graded(lambda number, _: f"[[{number + 1}]]", tmp_path, WRITING, given=same)
    assert len(server.bodies) == 2
    assert judged.judgments["baseline"].table.equals(judged.judgments["variant"].table)


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 503])
def test_a_passing_failure_is_tried_again(status: int, tmp_path: Path) -> None:
    later = status, {"error": {"message": "later"}}
    judged, server = graded(lambda number, _: later if number < 2 else "[[7]]", tmp_path, WRITING, **ONE)
    assert scores(judged) == [7.0, 7.0]
    assert len(server.bodies) == 4


def test_a_200_with_an_error_inside_is_tried_again_and_its_message_is_shown(tmp_path: Path) -> None:
    busy = {"error": {"message": "the upstream is busy", "code": 503}}
    with judge_server(lambda number, _: (200, busy) if number < 2 else "[[7]]") as server:
        assert scores(grade(server.base_url, tmp_path / "passing", WRITING, **ONE)) == [7.0, 7.0]
        assert len(server.bodies) == 4
    inside = "answered HTTP 200 with an error inside: the upstream is busy"
    with judge_server(lambda *_: (200, busy)) as server, pytest.raises(JudgeError, match=f"{inside}. Tried 2 times"):
        grade(server.base_url, tmp_path / "first", WRITING, judge_max_retries=1, **ONE)
    with judge_server(lambda number, _: "[[4]]" if number == 0 else (200, busy)) as server:
        judged = grade(server.base_url, tmp_path / "later", WRITING, judge_max_retries=1, **ONE)
        assert reasons(judged) == [None, "error_inside"] and judged.values["judge/unscored/error_inside"] == 1
        assert inside in judged.judgments["variant"].column("judgment")[1]


def test_a_lasting_failure_leaves_a_judgment_unscored_with_its_reason(tmp_path: Path) -> None:
    broken = 500, {"error": {"message": "broken"}}
    with judge_server(lambda _, body: broken if "Now about" in str(body) else "[[4]]") as server:
        judged = grade(server.base_url, tmp_path, WRITING, judge_max_retries=2, **ONE)
        assert len(server.bodies) == 4
        assert scores(judged) == [4.0, None] and reasons(judged) == [None, "http_500"]
        assert "Tried 3 times" in judged.judgments["variant"].column("judgment")[1]
        assert judged.values["judge/unscored/http_500"] == judged.values["judge/unscored"] == 1
        assert judged.failed is not None and "1 of 2 judgments have no rating: 1 http_500" in judged.failed
        # A failure cost nothing and is not kept: the same command asks again. Half unscored is allowed here.
        again = grade(server.base_url, tmp_path, WRITING, judge_max_retries=0, judge_max_unscored=0.5, **ONE)
        assert len(server.bodies) == 5 and again.failed is None


@pytest.mark.parametrize("answer", ["I like it.", "[[3]] for the style, [[9]] for the facts", ""])
def test_a_reply_that_cannot_be_read_is_asked_for_again(answer: str, tmp_path: Path) -> None:
    judged, server = graded(lambda number, _: answer if number == 0 else "[[4]]", tmp_path, WRITING, **ONE)
    assert scores(judged) == [4.0, 4.0]
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("reply", "reason", "calls"),
    [
        (completion("No."), "no_rating", 2),
        (completion("[[3]] or [[4]]"), "ambiguous", 2),
        (completion("[[11]]"), "out_of_range", 2),
        (completion(" "), "empty", 2),
        (completion(None), "empty", 2),
        (completion(None, refusal="I cannot."), "refusal", 2),
        (completion("[[5]]", refusal="I cannot."), "refusal", 2),
        (completion("", finish="content_filter"), "content_filter", 1),
        (completion("cut off", finish="length"), "length", 2),
        ({"object": "chat.completion", "choices": []}, "no_choices", 2),
    ],
)
def test_what_stays_unreadable_is_unscored_and_every_paid_reply_is_kept(
    reply: dict[str, Any], reason: str, calls: int, tmp_path: Path
) -> None:
    with judge_server(lambda _, body: (200, reply) if "Now about" in str(body) else "[[4]]") as server:
        for _ in range(2):  # the second time everything is kept
            judged = grade(server.base_url, tmp_path, WRITING, judge_attempts=2, **ONE)
            assert scores(judged) == [4.0, None] and reasons(judged) == [None, reason]
            assert judged.values[f"judge/unscored/{reason}"] == 1
            assert len(server.bodies) == 1 + calls
        # More attempts go on from there.
        grade(server.base_url, tmp_path, WRITING, judge_attempts=3, **ONE)
        assert len(server.bodies) == (4 if calls == 2 else 2)


def test_a_content_filter_and_a_400_are_not_asked_again(tmp_path: Path) -> None:
    def script(_: int, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        code = "content_filter" if "Now about" in str(body) else "other"
        return 400, {"error": {"message": "no", "code": code}}

    judged, server = graded(script, tmp_path, WRITING)
    assert reasons(judged) == ["http_400", "content_filter"]
    assert len(server.bodies) == 2


def test_an_unreachable_endpoint_is_named(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://user:password@127.0.0.1:{port}/v1"
    with pytest.raises(JudgeError, match="cannot be reached") as error:
        grade(url, tmp_path, WRITING, judge_max_retries=1)
    assert f"http://127.0.0.1:{port}/v1" in str(error.value)
    assert "password" not in str(error.value)


def test_a_silent_endpoint_times_out(tmp_path: Path) -> None:
    judged, _ = graded(lambda *_: Raw(status=0, silent=True), tmp_path, WRITING, judge_max_retries=0, judge_timeout=0.1)
    assert reasons(judged) == ["timeout", "timeout"]
    assert "did not answer within 0.1 s" in judged.judgments["variant"].column("judgment")[0]


@pytest.mark.parametrize("body", [b'{"hello": "world"}', b"[]", b"<html>welcome</html>", b'{"choices": [{"mess'])
def test_an_address_that_never_answers_as_an_endpoint_stops_at_once(body: bytes, tmp_path: Path) -> None:
    with (
        judge_server(lambda *_: Raw(body)) as server,
        pytest.raises(JudgeError, match=r"answered something else than .*Check judge_base_url: it often ends in /v1"),
    ):
        grade(server.base_url, tmp_path, *instructions(20), judge_max_retries=0)
    assert len(server.bodies) <= 17  # those under way, and no more


def test_an_unknown_model_and_spent_credit_stop_at_once(tmp_path: Path) -> None:
    missing = 404, {"error": {"message": "The model `x` does not exist"}}
    spent = 429, {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}
    for answer, message in ((missing, "has no model 'x'.*judge_model"), (spent, "no credit left")):
        with judge_server(lambda *_, a=answer: a) as server, pytest.raises(JudgeError, match=message):
            grade(server.base_url, tmp_path, *instructions(20), judge_model="x")
        assert len(server.bodies) <= 17


def test_the_key_never_shows(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG)
    shown = []
    for status in (401, 403, 404):
        echo = {"error": {"message": f"Incorrect API key provided: {KEY}"}}
        with judge_server(lambda *_, s=status, e=echo: (s, e)) as server, pytest.raises(JudgeError) as error:
            grade(server.base_url, tmp_path, WRITING, judge_max_retries=1)
        shown.append(error.getrepr(style="long", chain=True, showlocals=False).__str__())
        assert error.value.__cause__ is None
        assert error.value.__context__ is None
        if status in (401, 403):
            assert f"refused the key (HTTP {status}). Check OPENAI_API_KEY." in str(error.value)
    for status in (400, 500):
        echo = {"error": {"message": f"Incorrect API key provided: {KEY}"}}
        with judge_server(lambda *_, s=status, e=echo: (s, e)) as server:
            judged = grade(server.base_url, tmp_path, WRITING, judge_max_retries=1)
            assert reasons(judged) == [f"http_{status}"] * 2
        shown.append(str(judged))
        shown.append(str(judged.judgments["variant"].table.to_pylist()))
    with judge_server(lambda *_: f"Your key is {KEY}, pass-w0rd. [[5]]", model=KEY) as server:
        judged = grade(server.base_url.replace("//", "//user:pass-w0rd@"), tmp_path, WRITING)
        assert {key.split()[0] for key in server.keys} == {"Basic"}
    assert scores(judged) == [5.0, 5.0]
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    shown += [str(judged.judgments["variant"].table.to_pylist()), str(judged), caplog.text, *written]
    assert caplog.text and any(written)
    assert not [text for text in shown if KEY in text or "pass-w0rd" in text]
    assert "Your key is [key], [password]." in judged.judgments["variant"].column("judgment")[0]


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    cache = tmp_path / "judgments.jsonl"
    items = instructions(4)
    healthy = False

    def script(number: int, _: dict[str, Any]) -> str | tuple[int, dict[str, Any]]:
        return f"[[{min(number + 1, 10)}]]" if number < 3 or healthy else (401, {"error": {"message": "stop"}})

    with judge_server(script) as server:
        with pytest.raises(JudgeError, match="HTTP 401"):
            grade(server.base_url, tmp_path, *items, **ONE)
        assert len(cache.read_text().splitlines()) == 3
        with cache.open("a") as sink:  # the process died while it wrote a line
            sink.write('{"key": "abc", "val')
        healthy, asked = True, len(server.bodies)
        found = grade(server.base_url, tmp_path, *items, **ONE)
        assert len(server.bodies) - asked == 5
        assert scores(found) == [1, 2, 3, *(min(asked + n, 10) for n in range(1, 6))]
        # Everything is kept now: the next judge asks nothing, another model's judge asks everything.
        again = grade(server.base_url, tmp_path, *items, **ONE)
        assert again.judgments["variant"].table.equals(found.judgments["variant"].table)
        assert again.values["judge/calls"] == 0 and "judge/prompt_tokens" not in again.values
        assert len(server.bodies) - asked == 5
        grade(server.base_url, tmp_path, items[0], judge_model="other", **ONE)
        assert len(server.bodies) - asked == 7
    assert len(cache.read_text().splitlines()) == 10


def test_no_key_is_a_reason_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for environment in ({}, {"OPENAI_API_KEY": "  "}):
        assert "OPENAI_API_KEY" in str(endpoint_from(environment, JudgeConfig().judging))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    judged = opened("mt_bench", JudgeConfig(), tmp_path)(None)  # type: ignore[arg-type]
    assert judged.skipped is not None and not judged.judgments


def test_the_environment_gives_key_and_address() -> None:
    environment = {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": "http://a:b@localhost:8000/v1"}

    def url(given: str, environment: dict[str, str] = environment) -> str:
        found = endpoint_from(environment, JudgeConfig(judge_base_url=given).judging)
        assert isinstance(found, EndpointConfig)
        return found.base_url

    assert url("auto") == url("http://localhost:8000/v1") == "http://a:b@localhost:8000/v1"
    assert url("https://judge.example/v1") == "https://judge.example/v1"
    assert url("auto", {"OPENAI_API_KEY": KEY}) == "https://api.openai.com/v1"


@pytest.mark.parametrize("before", [None, "https://other.example/v1"])
def test_a_password_in_the_address_is_passed_on_in_the_environment_alone(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    if before is not None:
        monkeypatch.setenv("OPENAI_BASE_URL", before)
    asked = JudgeConfig(judge_base_url="https://me:secret@judge.example/v1?version=1")
    with without_password(asked) as kept:
        assert kept.judging.judge_base_url == "https://judge.example/v1"
        assert os.environ["OPENAI_BASE_URL"] == asked.judging.judge_base_url
        endpoint = endpoint_from({**os.environ, "OPENAI_API_KEY": KEY}, kept.judging)
    assert os.environ.get("OPENAI_BASE_URL") == before
    assert isinstance(endpoint, EndpointConfig)
    assert endpoint.called_url == "https://judge.example/v1?version=1"
    assert "secret" not in repr(endpoint)
    with without_password(JudgeConfig()) as kept:
        assert kept.judging.judge_base_url == "auto"
    monkeypatch.setenv("MLFLOW_RUN_ID", "r")
    with pytest.raises(ConfigError, match=r"mlflow run.*OPENAI_BASE_URL") as error:
        check_address(asked)
    assert "secret" not in str(error.value)
    check_address(JudgeConfig())


@pytest.mark.parametrize(
    "settings",
    [
        {"judge_repeats": 0},
        {"judge_attempts": 0},
        {"judge_concurrency": 0},
        {"judge_model": " "},
        {"judge_model": "a,a"},
        {"judge_model": "a,b@1"},
        {"judge_timeout": 0.0},
        {"judge_max_retries": -1},
        {"judge_max_cost": 1.0},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        open_judge("http://localhost/v1", tmp_path, **settings)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host/v1", "http://", ""])
def test_a_bad_address_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="base_url"):
        open_judge(url, tmp_path)


def test_a_key_that_no_header_can_carry_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError) as error:
        EndpointConfig(key="sk-ümlaut")
    assert "mlaut" not in str(error.value)


def test_a_single_turn_is_graded_alone(tmp_path: Path) -> None:
    one = Instruction("v", "generic", ("Who?",))
    with judge_server(lambda number, body: "Rating: [[7]]") as server:
        found = grade(server.base_url, tmp_path, one).judgments["variant"]
    assert [(row["turn"], row["score"]) for row in found.table.to_pylist()] == [(0, 7.0)]


def test_missing_answers_and_references_are_named() -> None:
    with pytest.raises(AlignmentError, match="m, turn 0"):
        gradings([MATH], answers(WRITING))
    bare = Instruction("m", "math", MATH.turns)
    with pytest.raises(DataError, match=r"Instruction m has no reference answers, and MT-Bench needs them for math"):
        gradings([bare], answers(bare))


def test_a_broken_cache_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "judgments.jsonl"
    value = json.dumps(dict.fromkeys(KEPT_FIELDS, ""))
    path.write_text(f'{{"key": "a", "value": {value}}}\nnot json\n')
    with pytest.raises(DataError, match="line 2: not JSON"):
        open_judge("http://localhost/v1", tmp_path)
    path.write_text('{"key": "a", "value": {"judgment": "[[3]]", "judge": "gpt-4 math"}}\n')
    with pytest.raises(DataError, match="line 1: a stored answer without asked, finish_reason, problem, usage"):
        open_judge("http://localhost/v1", tmp_path)


def test_every_judge_says_what_it_needs_and_where_it_comes_from() -> None:
    assert JUDGES.names() == ["divergent_tokens", "mt_bench", "pairwise", "similarity"]
    assert chosen_judges("all") == ["divergent_tokens", "mt_bench", "similarity"]
    assert chosen_judges("all,pairwise") == ["divergent_tokens", "mt_bench", "similarity", "pairwise"]
    for _, judge in JUDGES.items():
        assert judge.requires.endswith(".")
        assert judge.source


def _raises(settings: Any, folder: Path) -> Any:
    raise ValueError("no such file")


@pytest.mark.parametrize(
    ("judge", "reason"),
    [
        ({"open": _raises}, "ValueError: no such file"),
        ({"open": lambda settings, folder: None}, "TypeError: `open` returned NoneType, not a function"),
        ({"open": lambda settings, folder: lambda inputs: 1 / 0}, "ZeroDivisionError: division by zero"),
        ({"open": lambda settings, folder: lambda inputs: None}, "TypeError: it returned NoneType, not Judged"),
        (
            {"open": lambda settings, folder: lambda inputs: Judged(judgments={"variant": [1.0]})},
            "TypeError: Judged.judgments holds list of 'variant', not Judgments of 'baseline' and 'variant'",
        ),
        (
            {"open": _raises, "settings": pydantic.create_model("Settings", colour=(str, ...))},
            "TypeError: its settings declare 'colour', which is no parameter of the judge command",
        ),
    ],
)
def test_a_judge_of_a_plugin_that_fails_is_named(
    judge: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    JUDGES.names()
    monkeypatch.setitem(JUDGES._objects, "odd", Judge(requires="Nothing.", source="a test", **judge))
    monkeypatch.setitem(JUDGES._modules, "odd", "odd_plugin")
    with pytest.raises(ConfigError, match="^" + re.escape("The judge 'odd' of ")) as error:
        opened("odd", JudgeConfig(), tmp_path)(JudgeInputs(instructions=(), graded={}, samples={}))
    assert "odd_plugin" in str(error.value) and f"failed with {reason}" in str(error.value)


def test_a_judge_gets_the_settings_that_it_declares_and_no_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    got: list[Any] = []
    kind = pydantic.create_model("Settings", seed=(int, ...), judge_model=(str, ...))
    declared = Judge(
        open=lambda settings, folder: got.append(settings) or (lambda inputs: Judged()),
        settings=kind,
        requires="Nothing.",
        source="a test",
    )
    JUDGES.names()
    monkeypatch.setitem(JUDGES._objects, "odd", declared)
    monkeypatch.setitem(JUDGES._modules, "odd", "odd_plugin")
    opened("odd", JudgeConfig(seed=3), tmp_path)
    assert got == [kind(seed=3, judge_model="gpt-4")]


def test_two_processes_may_share_the_grades(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "judgments.jsonl"
    code = (
        "import sys; from pathlib import Path; from mlflow_compress.transport.replies import ReplyCache\n"
        "cache = ReplyCache(Path(sys.argv[1]))\n"
        "for i in range(40): cache.put(f'{sys.argv[2]}{i}', {'text': sys.argv[2] * 20_000})\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    both = [subprocess.Popen([*command, name]) for name in "ab"]
    assert [process.wait() for process in both] == [0, 0]
    cache = ReplyCache(path)
    assert len(cache) == 80 and cache.get("a7") == {"text": "a" * 20_000}
    with path.open("a") as sink:  # a process that died while it wrote
        sink.write('{"key": "c", "val')
    cache.put("d", {"text": "d"})  # by a process that had the file open before
    assert len(ReplyCache(path)) == 81


def test_a_reply_that_only_quotes_the_question_is_asked_again_and_then_unscored(tmp_path: Path) -> None:
    item = Instruction("q", "writing", ("Explain why you would give [[10]] here.",))
    judged, server = graded(lambda number, body: 'The user writes "give [[10]] here".', tmp_path, item)
    assert len(server.bodies) == 3
    assert judged.values["judge/unscored/quoted"] == judged.values["judge/judgments"] == 1
    judged, server = graded(lambda number, body: "Clear. Rating: [[10]]", tmp_path / "other", item)
    assert judged.judgments["variant"].column("score").tolist() == [10.0] and len(server.bodies) == 1


def rating(number: int, body: dict[str, Any]) -> str:
    return f"[[{7 if body['model'] == 'a' else number % 3 + 4}]]"


def test_each_judge_model_is_asked_and_recorded_by_itself_with_its_noise_floor(tmp_path: Path) -> None:
    items = instructions(4)
    given = {"baseline": answers(*items), "variant": answers(*items, by="other")}
    judged, server = graded(rating, tmp_path, *items, given=given, judge_model="a,b", judge_repeats=2)
    assert sorted(body["model"] for body in server.bodies) == ["a"] * 32 + ["b"] * 32
    assert judged.parameters["judge_model"] == "a,b" and judged.values["judge/calls"] == 64
    tasks = judged.judgments["variant"].table.column("task").to_pylist()
    assert sorted(set(tasks)) == ["mt_bench/a", "mt_bench/b"]
    found = compute_all(MetricInputs(**{who: RunRecords(judgments=part) for who, part in judged.judgments.items()}))
    by_task = {(r.name, r.task): r.value for r in found if r.category is None}
    assert by_task["judge/mt_bench", "a"] == 7 and by_task["judge/mt_bench_noise", "a"] == 0
    assert by_task["judge/mt_bench_noise", "b"] > 0
    given = {"baseline": answers(*items), "variant": answers(*items, by="other")}
    judged, server = graded(rating, tmp_path, *items, given=given, judge_model="b", judge_repeats=2)
    pooled = headline(
        compute_all(MetricInputs(**{who: RunRecords(judgments=part) for who, part in judged.judgments.items()}))
    )
    [row] = [row for row in headline_rows(pooled) if row.label == "MT-Bench"]
    assert row.noise is not None and float(row.noise) > 0
