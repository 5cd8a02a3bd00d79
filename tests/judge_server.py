"""A real local HTTP server that speaks the chat-completions protocol and answers by a script, faults included."""

import hashlib
import json
import math
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock

import pytest

from mlflow_compress.transport import client
from mlflow_compress.transport.client import Transport
from tests.waiting import until


@dataclass(frozen=True)
class Raw:
    """A response byte for byte. `cut` ends the connection that many bytes before the end.

    Of a `silent` one the body is announced and never sent, until the client gives up; with status 0 nothing is sent.
    """

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    kind: str = "application/json"
    cut: int = 0
    silent: bool = False


Answer = str | tuple[int, dict[str, Any]] | Raw
Script = Callable[[int, dict[str, Any]], Answer]
"""From the request's number (0, 1, ...) and body to the judge's text, a status with a JSON body, or a raw response."""


@dataclass
class JudgeServer:
    """What the server saw, and where it is."""

    base_url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    most_at_once: int = 0


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # whoever closes it waits for the requests that it has begun
    request_queue_size = 128  # a burst of connections is not turned away

    def handle_error(self, *_: Any) -> None:
        """Keep the output clean when a client has gone."""


_SILENT = "X-Silent"  # a header that announces that nothing follows


class RawHandler(BaseHTTPRequestHandler):
    """Sends raw answers, faults included."""

    def send_raw(self, raw: Raw) -> None:
        self.close_connection = True
        if raw.status:  # otherwise the connection breaks before an answer
            self.send_response(raw.status)
            self.send_header("Content-Type", raw.kind)
            self.send_header("Content-Length", str(len(raw.body) + raw.silent))  # more than nothing
            for name, value in {**raw.headers, **({_SILENT: "1"} if raw.silent else {})}.items():
                self.send_header(name, value)
            self.end_headers()
        if raw.silent:
            with suppress(ConnectionError):
                while self.connection.recv(1):  # until the client closes the connection, or dies
                    pass
        elif raw.status:
            self.wfile.write(raw.body[: len(raw.body) - raw.cut])

    def log_message(self, *_: Any) -> None:
        """Keep the test's output clean."""


@contextmanager
def giving_up_on_silence() -> Iterator[None]:
    """Let this process's clients wait for a millisecond where a server announces its silence.

    So a call times out because the server wants it, and no other one does, however slow the machine is: the client's
    own time-out may be long.
    """
    from openai import DefaultAsyncHttpxClient

    init = DefaultAsyncHttpxClient.__init__

    async def after_the_head(response: Any) -> None:
        if _SILENT in response.headers:
            response.request.extensions["timeout"]["read"] = 0.001

    def impatient(self: Any, **settings: Any) -> None:
        init(self, **{"event_hooks": {"response": [after_the_head]}, **settings})

    with mock.patch.object(DefaultAsyncHttpxClient, "__init__", impatient):
        yield


class CtrlC:
    """Ctrl-C while a server works on calls of this process, which get all the time that they need to end."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        enter, opened = Transport.__enter__, list[Transport]()
        patch.setattr(Transport, "__enter__", lambda one: opened.append(one) or enter(one))
        patch.setattr(client, "_ENDING_SECONDS", math.inf)
        self._opened, self._lock, self._pressed = opened, threading.Lock(), False

    def press(self) -> None:
        """Press it, once, and return when no further call begins. A server calls this before it answers."""
        with self._lock:
            if not self._pressed:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            self._pressed = True
        until(lambda: any(one._ending.is_set() for one in self._opened))


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler], port: int = 0) -> Iterator[str]:
    """Serve until the block ends, which gets the address of the API."""
    server = _Server(("127.0.0.1", port), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        with giving_up_on_silence():
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def judge_server(script: Script, *, model: str = "gpt-4-0613", port: int = 0) -> Iterator[JudgeServer]:
    """Serve until the block ends. Errors ask for a retry after one millisecond, so that tests need not wait."""
    lock = threading.Lock()
    state = JudgeServer("")
    running = 0

    class Handler(RawHandler):
        def do_POST(self) -> None:
            nonlocal running
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(state.bodies)
                state.bodies.append({"path": self.path, **body})
                state.keys.append(self.headers["Authorization"].removeprefix("Bearer "))
                running += 1
                state.most_at_once = max(state.most_at_once, running)
            try:
                raw = self._raw(script(number, body))
            finally:
                with lock:
                    running -= 1  # before it is sent, after which the client may ask the next one
            self.send_raw(raw)

        def _raw(self, answer: Answer) -> Raw:
            if isinstance(answer, Raw):
                return answer
            if isinstance(answer, str):
                return Raw(json.dumps(completion(answer, model)).encode())
            status, payload = answer
            return Raw(json.dumps(payload).encode(), status, {} if status == 200 else {"retry-after-ms": "1"})

    with listening(Handler, port) as state.base_url:
        yield state


def completion(
    text: str | None, model: str = "gpt-4-0613", *, finish: str = "stop", usage: Any = None, **message: Any
) -> dict[str, Any]:
    """Return a chat completion as OpenAI writes it."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}
        ],
        **({"usage": usage} if usage is not None else {}),
    }


def question_of(body: Mapping[str, Any]) -> str:
    """Return what is asked, as a short hash of the messages."""
    return hashlib.sha256(json.dumps(body["messages"]).encode()).hexdigest()[:16]


PASSING = ("rate_limit", "server_error", "timeout", "dropped", "truncated", "html")
"""Faults that cost nothing, and pass."""
PAID = ("refusal", "empty", "off_format")
"""Replies that cost money, and in which nothing can be read."""


def fault(kind: str, text: str) -> Raw:
    """Return a response with a fault."""
    whole = json.dumps(completion(text)).encode()
    return {
        "rate_limit": Raw(b'{"error": {"message": "slow down"}}', 429, {"Retry-After": "0.01"}),
        "server_error": Raw(b'{"error": {"message": "broken"}}', 500, {"retry-after-ms": "1"}),
        "timeout": Raw(whole, silent=True),
        "dropped": Raw(status=0),
        "truncated": Raw(whole[:-20]),
        "html": Raw(b"<html><body>Bad gateway</body></html>", kind="text/html"),
        "refusal": Raw(json.dumps(completion(None, refusal="I cannot judge this.")).encode()),
        "empty": Raw(json.dumps(completion("")).encode()),
        "off_format": Raw(json.dumps(completion("Rating: seven")).encode()),
    }[kind]


@dataclass
class FaultyJudge:
    """A script that injects every kind of fault in turn, at a share of the calls, and rates by the question."""

    share: float = 0.3  # of the calls that fail
    paid: Counter[str] = field(default_factory=Counter)  # replies that cost money, by question
    injected: Counter[str] = field(default_factory=Counter)
    most_paid: float = math.inf  # after so many replies, none is sent before `goes_on`
    goes_on: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def rating(self, question: str) -> int:
        """Return the rating of a question: always the same."""
        return int(question, 16) % 10 + 1

    def __call__(self, number: int, body: Mapping[str, Any]) -> Answer:
        """Answer one call."""
        question = question_of(body)
        text = f"Good. Rating: [[{self.rating(question)}]]"
        kinds = (*PASSING, *PAID)
        # Every tenth of the calls is even: at 30 %, calls 0, 1 and 2 of ten fail, with the next kind each.
        fails = number % 10 < round(10 * self.share)
        kind = kinds[(number // 10 * 3 + number % 10) % len(kinds)] if fails else ""
        with self._lock:
            if kind:
                self.injected[kind] += 1
            if kind not in PASSING:
                self.paid[question] += 1
            held = self.paid.total() > self.most_paid
        if held:
            self.goes_on.wait()
        return fault(kind, text) if kind else text
