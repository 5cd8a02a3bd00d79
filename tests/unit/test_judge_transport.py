"""The transport: what endpoints accept, when calls are tried again, how fast they come, and what they cost."""

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_compress import demo
from mlflow_compress.commands.evaluate.result import AnswerEvaluation
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.judge.run import _vectors, run_judge
from mlflow_compress.compression import compress_model
from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest, hash_others
from mlflow_compress.errors import ConfigError
from mlflow_compress.judges import Judged
from mlflow_compress.judges.asking import Asker, Question, estimate, gradings, read_rating
from mlflow_compress.judges.judge_registry import AnswerVectors
from mlflow_compress.judges.prompts import Prompt
from mlflow_compress.judges.session import spending_of
from mlflow_compress.kept import keeping
from mlflow_compress.reporting.answers_page import account_rows, account_text
from mlflow_compress.reporting.html import render_report
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.transport import client
from mlflow_compress.transport import spending as budgets
from mlflow_compress.transport.client import PerMinute, Transport
from mlflow_compress.transport.endpoint import EndpointConfig
from mlflow_compress.transport.replies import CONNECTION, NoReply, Reply, ReplyCache, Usage, read_completion
from tests.clock import Clock
from tests.judge_server import PAID, PASSING, CtrlC, FaultyJudge, Raw, completion, judge_server, question_of
from tests.judging import KEY, WRITING, answers, grade, graded, instructions
from tests.waiting import until

USAGE = {"prompt_tokens": 100, "completion_tokens": 20}
ONE = {"judge_concurrency": 1}


def refused(message: str, param: str | None = None) -> tuple[int, dict[str, Any]]:
    return 400, {"error": {"message": message, "param": param, "code": "unsupported_parameter"}}


def reasoning_model(number: int, body: dict[str, Any]) -> str | tuple[int, dict[str, Any]]:
    """Refuse what OpenAI's reasoning models refuse, with their messages."""
    if "max_tokens" in body:
        return refused(
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
        )
    if "temperature" in body:
        return refused("Unsupported value: 'temperature' does not support 0 with this model.", "temperature")
    if body["messages"][0]["role"] == "system":
        return refused("Unsupported value: 'messages[0].role' does not support 'system' with this model.")
    return "[[8]]"


def test_the_first_call_finds_out_what_the_model_accepts_and_a_400_that_names_nothing_teaches_nothing(
    tmp_path: Path,
) -> None:
    _, server = graded(lambda *_: refused("This prompt is not allowed."), tmp_path, WRITING)
    assert len(server.bodies) == 2
    judged, server = graded(reasoning_model, tmp_path, *instructions(10))
    assert judged.values["judge/unscored"] == 0
    assert len(server.bodies) == 3 + 20  # three refusals, once
    assert server.bodies[-1]["max_completion_tokens"] == 8192
    [message] = server.bodies[-1]["messages"]
    assert message["role"] == "user" and "You evaluation should focus" in message["content"] + str(server.bodies)
    assert judged.parameters["judge_sent"] == "max_completion_tokens=8192, system=in the user's message"


def test_a_reply_that_is_cut_off_is_asked_again_with_more_room(tmp_path: Path) -> None:
    cut = 200, completion("", finish="length")
    judged, server = graded(lambda _, body: "[[6]]" if body["max_tokens"] >= 4096 else cut, tmp_path, WRITING, **ONE)
    assert judged.judgments["variant"].column("score").tolist() == [6, 6]
    assert [body["max_tokens"] for body in server.bodies] == [2048, 4096] * 2


def test_where_more_room_is_refused_the_cut_reply_stands(tmp_path: Path) -> None:
    def script(number: int, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body["max_tokens"] > 2048:
            return 400, {"error": {"message": "maximum context length is 4096 tokens"}}
        return 200, completion("on and on", finish="length")

    judged, _ = graded(script, tmp_path, WRITING, **ONE)
    assert judged.judgments["variant"].column("reason").tolist() == ["length", "length"]
    assert judged.judgments["variant"].column("judgment").tolist() == ["on and on", "on and on"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of all pauses between calls: none of them takes any time."""
    clock = Clock()
    clock.drive(monkeypatch, client)
    return clock


def test_retry_after_is_read_as_seconds_milliseconds_or_a_date(clock: Clock) -> None:
    assert client.retry_after({"retry-after": "2.5"}) == 2.5
    assert client.retry_after({"retry-after-ms": "250", "retry-after": "9"}) == 0.25
    assert client.retry_after({"retry-after": formatdate(clock.time() + 60, usegmt=True)}) == 60
    assert client.retry_after({"retry-after": formatdate(clock.time() - 60, usegmt=True)}) == 0
    for nonsense in (
        {},
        {"retry-after": "soon"},
        {"retry-after": "-1"},
        {"retry-after": "inf"},
        {"retry-after": "nan"},
    ):
        assert client.retry_after(nonsense) is None


@given(st.integers(0, 2000))
def test_back_off_grows_to_a_limit_and_is_drawn_at_random(retry: int) -> None:
    longest = min(0.5 * 2 ** min(retry, 10), 30.0)
    drawn = {client.back_off(retry) for _ in range(20)}
    assert all(longest / 2 <= wait <= longest for wait in drawn) and len(drawn) > 1


def test_retry_after_is_waited_for_and_grows_where_nothing_is_asked(tmp_path: Path, clock: Clock) -> None:
    later = [Raw(b"{}", 429, {"Retry-After": "300"}), Raw(b"{}", 503), Raw(b"{}", 503)]
    _, server = graded(lambda number, _: later[number] if number < len(later) else "[[3]]", tmp_path, WRITING)
    assert len(server.bodies) == 2 + len(later) == 2 + len(clock.pauses)
    asked, second, third = clock.pauses
    assert asked == 300 and 0.5 <= second <= 1 <= third <= 2


def test_a_server_that_asks_for_an_hour_has_said_no(tmp_path: Path, clock: Clock) -> None:
    judged, server = graded(lambda *_: Raw(b"{}", 429, {"Retry-After": "3600"}), tmp_path, WRITING)
    assert judged.values["judge/unscored/http_429"] == 2 and len(server.bodies) == 2 and clock.pauses == []


def test_no_minute_holds_more_than_the_limit(clock: Clock) -> None:
    times: list[tuple[float, int]] = []
    begin = clock.now

    async def work() -> None:
        limit = PerMinute(10)

        async def call(units: int) -> None:
            await limit.take(units)
            times.append((clock.now - begin, units))

        await asyncio.gather(*(call(units) for units in (4, 4, 4, 1, 1, 1, 9, 30, 2)))

    asyncio.run(work())
    # First come, first served. 4 + 4 + 4 and 4 + 1 + 1 + 1 + 9 are above 10; what is larger alone has its own minute.
    assert times == [(0, 4), (0, 4), (60, 4), (60, 1), (60, 1), (60, 1), (120, 9), (180, 30), (240, 2)]


def test_requests_per_minute_reach_the_endpoint(tmp_path: Path, clock: Clock) -> None:
    _, server = graded(lambda *_: "[[3]]", tmp_path, *instructions(4), judge_requests_per_minute=4)
    assert len(server.bodies) == 8 and clock.pauses == [60]  # four in each minute


def test_concurrency_is_a_limit(tmp_path: Path) -> None:
    three = threading.Barrier(3)  # each waits for two others

    def script(number: int, body: dict[str, Any]) -> str:
        if 1 <= number <= 21:  # the first call is made alone, and of 23 more the last two have no third
            three.wait()
        return "[[3]]"

    _, server = graded(script, tmp_path, *instructions(12), judge_concurrency=3)
    assert len(server.bodies) == 24 and server.most_at_once == 3


PRICES = "gpt-4: {prompt: 30, completion: 60}\n"


def test_tokens_and_cost_are_summed_from_the_replies(tmp_path: Path) -> None:
    def script(number: int, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        more = {"completion_tokens_details": {"reasoning_tokens": 5}}
        usage = [USAGE, {**USAGE, **more}, None, {"prompt_tokens": "many"}][number]
        return 200, completion("[[5]]", usage=usage)

    (tmp_path / "prices.yaml").write_text(PRICES)
    judged, _ = graded(script, tmp_path, *instructions(2), judge_prices=str(tmp_path / "prices.yaml"), **ONE)
    assert judged.values == {
        "judge/judgments": 4,
        "judge/unscored": 0,
        "judge/calls": 4,
        "judge/calls_without_usage": 2,
        "judge/prompt_tokens": 200,
        "judge/completion_tokens": 40,
        "judge/reasoning_tokens": 5,  # part of the completion tokens: 200 x 30 + 40 x 60 per million
        "judge/cost": pytest.approx(0.0084),
    }


def test_the_budget_stops_before_the_next_call_and_the_next_run_goes_on(tmp_path: Path) -> None:
    # The longest reply costs 2048 x 60 per million = 0.123, a prompt at most 0.03; a call that was answered 0.0042.
    (tmp_path / "prices.yaml").write_text(PRICES)
    prices = {"judge_prices": str(tmp_path / "prices.yaml")}
    with judge_server(lambda *_: (200, completion("[[5]]", usage=USAGE))) as server:
        first = grade(server.base_url, tmp_path, *instructions(20), judge_max_cost=0.2, **prices)
        n = len(server.bodies)
        assert 0 < n < 40
        assert first.values["judge/cost"] == pytest.approx(n * 0.0042) and first.values["judge/cost"] <= 0.2
        assert first.values["judge/unscored/budget"] == 40 - n
        assert first.failed is not None and "Stopped at judge_args: max_cost" in first.failed
        assert f"{n} of 40 judgments are saved" in first.failed
        second = grade(server.base_url, tmp_path, *instructions(20), judge_max_cost=5.0, **prices)
        assert len(server.bodies) == 40 and second.failed is None and second.values["judge/unscored"] == 0


def test_calls_that_were_never_answered_are_booked_at_the_most_that_they_can_cost(tmp_path: Path, clock: Clock) -> None:
    """The server works on what it is sent, whether or not anybody waits for it."""
    (tmp_path / "prices.yaml").write_text(PRICES)
    prices = {"judge_prices": str(tmp_path / "prices.yaml"), "judge_max_retries": 5}
    with judge_server(lambda *_: Raw(silent=True)) as server:
        graded = grade(server.base_url, tmp_path, *instructions(20), judge_max_cost=0.45, judge_concurrency=1, **prices)
        # A call can cost 0.123 for the longest reply and up to 0.06 for its prompt: two or three fit.
        assert 2 <= len(server.bodies) <= 3
    assert graded.values["judge/calls_unanswered"] == len(server.bodies)
    assert graded.values["judge/unscored/budget"] > 0


def test_other_scripts_are_counted_by_their_characters() -> None:
    english, chinese = [{"role": "user", "content": "word " * 80}], [{"role": "user", "content": "字" * 100}]
    assert (budgets.likely_tokens(english), budgets.likely_tokens(chinese)) == (100, 100)
    assert budgets.longest_prompt(budgets.prompt_bytes(chinese)) >= 300  # a rare script has a token for every byte


@given(
    st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 3000), st.floats(0, 1), st.booleans()), max_size=30),
    st.floats(0.01, 1.0),
)
def test_what_is_spent_never_exceeds_the_budget(calls: list[tuple[int, int, float, bool]], budget: float) -> None:
    spending = budgets.Spending({"m": budgets.Price(prompt=30.0, completion=60.0)}, budgets.Budget(budget))
    for n_bytes, longest, used, counted in calls:
        most = spending.most("m", n_bytes, longest)
        if spending.is_decided(most) and spending.begin(most):
            usage = Usage(n_bytes // 2, int(longest * used))
            spending.end("m", most, usage if counted else None, answered=True)
    assert spending.cost is not None and spending.cost <= budget


@pytest.mark.parametrize(
    "text",
    ["gpt-4: 3", "gpt-4: {prompt: 1}", "gpt-4: {prompt: -1, completion: 1}", "- a", "a: {", "gpt-4: {prompt: x}"],
)
def test_broken_prices_are_one_clear_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="prices"):
        budgets.read_prices(path)


def test_a_judge_without_a_price_is_named(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(PRICES)
    with pytest.raises(ConfigError, match=r"no price of a judge model.*other"):
        grade("http://127.0.0.1/v1", tmp_path, judge_model="other", judge_prices=str(tmp_path / "prices.yaml"))


@given(st.text())
def test_any_body_is_a_reply_or_a_reason(text: str) -> None:
    assert isinstance(read_completion(text, "m"), Reply | NoReply)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda part: (
            st.lists(part)
            | st.dictionaries(
                st.sampled_from(
                    ["choices", "message", "content", "usage", "prompt_tokens", "completion_tokens", "object"]
                ),
                part,
            )
        ),
    )
)
def test_any_json_is_a_reply_or_a_reason(value: Any) -> None:
    found = read_completion(json.dumps(value), "m")
    assert isinstance(found, NoReply) or found.problem is not None or found.text.strip()


@pytest.mark.usefixtures("command_signals")
def test_ctrl_c_ends_the_calls_and_keeps_what_was_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctrl_c = CtrlC(monkeypatch)

    def script(number: int, body: dict[str, Any]) -> str:
        if number >= 5:
            ctrl_c.press()
        return "[[3]]"

    with judge_server(script) as server:
        with pytest.raises(KeyboardInterrupt):
            grade(server.base_url, tmp_path, *instructions(30), judge_concurrency=4)
        assert 6 <= len(server.bodies) <= 9
    # Those that were under way are kept too: nothing that was paid for is asked again.
    assert len((tmp_path / "judgments.jsonl").read_text().splitlines()) == len(server.bodies)
    assert not [t for t in threading.enumerate() if t.name == "judge"]


TEXTS = ("four " * 8, "\u8bc4" * 40)


def test_the_estimate_says_what_is_kept_and_learns_from_it(tmp_path: Path) -> None:
    said: list[str] = []
    from mlflow_compress.commands.judge.parameters import JudgeConfig
    from mlflow_compress.judges import JudgeInputs
    from mlflow_compress.judges.session import spending_of
    from tests.judging import answers, open_judge

    (tmp_path / "prices.yaml").write_text(PRICES)
    settings = {"judge_prices": str(tmp_path / "prices.yaml")}
    with judge_server(lambda *_: (200, completion("[[5]]", usage=USAGE))) as server:
        for n in (1, 3, 3):
            items = instructions(n)
            inputs = JudgeInputs(
                instructions=items,
                graded={"variant": answers(*items)},
                samples={},
                spending=spending_of(JudgeConfig(**settings).judging),
                say=said.append,
            )
            open_judge(server.base_url, tmp_path, **settings)(inputs)
    assert said[0].startswith("[judge] gpt-4: 2 judgments, 0 of them kept; 2 calls: about ")
    assert "4,096 tokens of replies" in said[0] and "with replies as long as they may be" in said[0]
    # Two kept replies of 20 tokens: four more take 80, and each prompt of about the same length 100 tokens.
    assert "6 judgments, 2 of them kept; 4 calls" in said[1] and "80 tokens of replies" in said[1]
    assert "about 400 prompt tokens" in said[1] and "cost 0.0168 (as in 2 kept replies" in said[1]
    assert said[2].endswith("6 judgments, 6 of them kept; no calls")


def test_an_estimate_knows_neither_the_replies_of_another_endpoint_nor_letters_of_another_script() -> None:
    """An endpoint counts one token for four letters of English, and one for each Chinese character."""
    english, chinese = (Question(text[:2], Prompt("p", "", text), 0) for text in TEXTS)
    answered = completion("[[5]]", usage={"prompt_tokens": 10, "completion_tokens": 7})
    with judge_server(lambda *_: (200, answered)) as server, judge_server(lambda *_: "[[5]]") as another:
        cache = ReplyCache(None)
        here, there = (
            Asker(endpoint=EndpointConfig(base_url=one.base_url, key=KEY), cache=cache) for one in (server, another)
        )
        here.ask_all([english], read_rating)
        assert "about 40 prompt tokens and 7 tokens of replies" in estimate(here, [chinese], read_rating, {})
        assert "2,048 tokens of replies (with replies as long" in estimate(there, [chinese], read_rating, {})


@pytest.mark.parametrize(("listens", "paid"), [(False, 0), (True, 1)])
def test_only_a_call_that_reached_a_server_may_have_been_paid(listens: bool, paid: int) -> None:
    """A connection that breaks before an answer counts as one, a connection that is refused does not."""
    with judge_server(lambda *_: Raw(status=0)) as server:
        url = server.base_url if listens else "http://127.0.0.1:1/v1"
        with Transport(EndpointConfig(base_url=url, key=KEY, max_retries=0)) as transport:
            transport._answered = True  # otherwise its address is said to be wrong
            asked = transport.for_all(
                lambda text: transport.complete([{"role": "user", "content": text}], model="m", max_tokens=8), ["a"]
            )
    assert asked[0].reason == CONNECTION
    assert sum(tokens.unanswered for tokens in transport.spending.by_model.values()) == paid


def test_the_transport_works_inside_a_running_event_loop() -> None:
    async def notebook() -> list[Any]:
        with judge_server(lambda *_: "[[3]]") as server:
            config = EndpointConfig(base_url=server.base_url, key=KEY)
            with Transport(config) as transport:

                async def ask(text: str) -> Any:
                    return await transport.complete([{"role": "user", "content": text}], model="m", max_tokens=8)

                return transport.for_all(ask, ["a", "b"])

    assert [reply.text for reply in asyncio.run(notebook())] == ["[[3]]", "[[3]]"]


def test_a_placeholder_for_a_key_is_not_cut_out_of_replies() -> None:
    short = EndpointConfig(base_url="http://127.0.0.1:1/v1", key="1")
    assert short.without_secrets("Rating: [[10]], of 10") == "Rating: [[10]], of 10"
    long = EndpointConfig(base_url="http://127.0.0.1:1/v1", key="sk-12345678")
    assert long.without_secrets("the key sk-12345678 is wrong") == "the key [key] is wrong"


ATTEMPTS = 3
ITEMS = instructions(80)
SETTINGS: dict[str, Any] = {"judge_attempts": ATTEMPTS, "judge_max_unscored": 1.0}
# The process that is killed: it grades as the judge stage does.
COMMAND = """
import sys
from pathlib import Path
from tests.judge_server import giving_up_on_silence
from tests.unit.test_judge_transport import ITEMS, SETTINGS, grade
with giving_up_on_silence():
    grade(sys.argv[1], Path(sys.argv[2]), *ITEMS, **SETTINGS)
"""


def check_records(judged: Any, script: FaultyJudge) -> None:
    """Check that every judgment is there once, with its own rating or the reason why it has none."""
    found = judged.judgments["variant"]
    keys = found.key_rows()
    assert len(keys) == len(set(keys)) == 160
    asked = {(one.item_id, one.turn): one.prompt for one in gradings(ITEMS, answers(*ITEMS))}
    unscored: Counter[str] = Counter()
    for row in found.table.to_pylist():
        if row["score"] is None:
            unscored[row["reason"]] += 1
            continue
        assert row["reason"] is None
        prompt = asked[row["item_id"], row["turn"]]
        assert row["score"] == script.rating(question_of({"messages": prompt.messages}))
    assert judged.values["judge/judgments"] == 160 and judged.values["judge/unscored"] == unscored.total()
    for reason, number in unscored.items():
        assert judged.values[f"judge/unscored/{reason}"] == number
    assert unscored.total() <= 8  # 5 %, the default limit


def test_every_judgment_is_scored_or_unscored_with_its_reason(tmp_path: Path, clock: Clock) -> None:
    script = FaultyJudge()
    with judge_server(script) as server:
        judged = grade(server.base_url, tmp_path, *ITEMS, **SETTINGS)
        calls = len(server.bodies)
    assert set(script.injected) == {*PASSING, *PAID}
    assert 0.25 < script.injected.total() / calls < 0.35
    check_records(judged, script)
    # Each question was paid for once, and once more for each paid reply that could not be read, up to the attempts.
    unreadable = sum(script.injected[kind] for kind in PAID)
    assert script.paid.total() == 160 + unreadable - judged.values["judge/unscored"]
    assert max(script.paid.values()) <= ATTEMPTS
    assert judged.values["judge/calls"] == script.paid.total()


@pytest.mark.ci
def test_after_kill_9_half_way_no_paid_reply_is_asked_for_again(tmp_path: Path) -> None:
    script = FaultyJudge(most_paid=80)
    cache = tmp_path / "judgments.jsonl"
    with tempfile.TemporaryFile("w+") as log, judge_server(script) as server:
        environment = {**os.environ, "OPENAI_API_KEY": KEY}
        command = [sys.executable, "-c", COMMAND, server.base_url, str(tmp_path)]
        process = subprocess.Popen(command, env=environment, stderr=log)
        try:
            until(
                lambda: cache.exists() and cache.read_bytes().count(b"\n") >= 60,
                ended=lambda: process.poll() is not None,
                said=lambda: log.seek(0) or log.read(),
            )
        finally:
            process.kill()
            process.wait()
            script.goes_on.set()
    # The server has finished the calls that were under way.
    kept = cache.read_bytes().count(b"\n")
    before, under_way = script.paid.copy(), script.paid.total() - kept
    assert 60 <= kept <= 80 and 0 <= under_way <= 16
    with judge_server(script, port=urlsplit(server.base_url).port) as server:
        judged = grade(server.base_url, tmp_path, *ITEMS, **SETTINGS)
    check_records(judged, script)
    # What was kept was not asked again: all replies that were paid for are in the cache, but those that were under way.
    assert script.paid.total() - before.total() == judged.values["judge/calls"]
    assert cache.read_bytes().count(b"\n") == script.paid.total() - under_way
    assert max(script.paid.values()) <= ATTEMPTS + 1  # one reply may have been under way


VALUES = {
    "judge/judgments": 320.0,
    "judge/unscored": 4.0,
    "judge/unscored/http_500": 1.0,
    "judge/unscored/ambiguous": 3.0,
    "judge/calls": 165.0,
    "judge/calls_without_usage": 2.0,
    "judge/prompt_tokens": 123456.0,
    "judge/completion_tokens": 34000.0,
    "judge/reasoning_tokens": 20000.0,
    "judge/cost": 1.23456,
}
ROWS = [
    ("Judgments", "320, 4 of them without a rating: 3 ambiguous, 1 http_500"),
    ("New calls", "165, 2 of them without a count of tokens"),
    ("Tokens of prompts", "123,456"),
    ("Tokens of replies", "34,000, of which 20,000 were reasoning"),
    ("Cost", "1.235, in the currency of the prices"),
]


def test_every_number_that_is_known_is_shown() -> None:
    assert account_rows(VALUES) == ROWS
    given = {"judge/judgments": 4.0, "judge/unscored": 0.0, "judge/calls": 0.0}
    assert account_rows(given) == [("Judgments", "4, all with a rating"), ("New calls", "0")]
    assert account_text(given) == "judgments 4, all with a rating; new calls 0"
    assert account_rows({"judge/similarity": 0.9}) == [] and account_text({}) == ""


def test_the_report_and_the_terminal_show_it() -> None:
    page = render_report(title="t", verdict="v", results=[], judge_values=VALUES)
    for name, text in ROWS:
        assert re.search(rf'<th scope="row">{name}</th>\n<td class="long"><code>{re.escape(text)}</code></td>', page)
    assert "Judgments and their cost" not in render_report(title="t", verdict="v", results=[])
    found = AnswerEvaluation(name="n", results=(), records_folder=Path("r"), baseline="b", account=VALUES)
    assert [f"{name}: {text}" for name, text in ROWS] == found.as_text().splitlines()
    assert found.to_dict()["account"] == VALUES


def test_the_runs_of_a_sweep_share_one_budget_and_other_runs_do_not(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text("gpt-4: {prompt: 1000, completion: 1000}")
    config = JudgeConfig(judge_prices=str(tmp_path / "prices.yaml"), judge_max_cost=1.0).judging
    with keeping():
        first, second = spending_of(config), spending_of(config)
        assert first.begin(0.7) and not second.is_decided(0.7)
        first.end("gpt-4", 0.7, None, answered=True)  # without a count, it counts as the most that it can cost
        assert not second.begin(0.7) and second.begin(0.3)
        assert (first.calls, second.calls) == (1, 0)  # each run logs its own
    assert spending_of(config).begin(0.7) and spending_of(config).begin(0.7)


@pytest.mark.filterwarnings("ignore")
def test_both_models_are_asked_in_the_baselines_chat_template(
    workdir: Path, tracker: Tracker, no_fresh_process: None
) -> None:
    compress_model(str(demo.MODEL_DIR), "none", None, [], workdir / "out")
    (workdir / "out" / "chat_template.jinja").unlink()
    saved = CheckpointManifest.read(workdir / "out", verify=False)
    replace(saved, other_files=hash_others(workdir / "out")).write(workdir / "out")
    run_judge(
        JudgeConfig(
            checkpoint=str(workdir / "out"), instruction_limit=1, num_samples=2, max_new_tokens=8, judge_max_tokens="8"
        )
    )
    [judged] = tracker.find_finished("judge")
    # The same model under the same prompts: its sampled answers are exactly the baseline's second sample.
    assert judged.data.metrics["judge/similarity"] == judged.data.metrics["judge/similarity_floor"]
    assert judged.data.metrics["judge/identical_answers_pct"] == 100.0 and judged.data.metrics["judge/kl_greedy"] == 0.0
    # The runs of the baseline's answers are no variant's: they stand in the experiment beside this one.
    runs = tracker.client.search_runs([tracker.experiment_id])
    assert {run.data.tags["stage"] for run in runs} == {"judge", "answers", "greedy"}


@pytest.mark.filterwarnings("ignore")
def test_two_judges_that_embed_are_refused_and_named() -> None:
    same = {who: np.ones((1, 2, 3), dtype=np.float32) for who in ("baseline", "variant", "again")}
    vectors = AnswerVectors("instructions", ("i",), same, "encoder", "id")
    assert _vectors({"a": Judged(vectors=vectors), "rates": Judged()}) is vectors
    assert _vectors({"rates": Judged()}) is None
    with pytest.raises(ConfigError, match="a, b"):
        _vectors({"a": Judged(vectors=vectors), "b": Judged(vectors=vectors)})
