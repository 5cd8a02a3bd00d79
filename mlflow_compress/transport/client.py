"""Asynchronous calls behind a synchronous interface: many at once, each retried while it may help."""

import asyncio
import random
import re
import ssl
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, Self, TypeVar

from mlflow_compress.errors import MlflowCompressError
from mlflow_compress.transport import replies
from mlflow_compress.transport.endpoint import EndpointConfig
from mlflow_compress.transport.replies import Answered, Embedded, NoReply, Reply
from mlflow_compress.transport.spending import BYTES_PER_TOKEN, Spending, prompt_bytes

T = TypeVar("T")
R = TypeVar("R")
A = TypeVar("A", bound=Answered)


_ENDING_SECONDS = 5.0
"""After an error or Ctrl-C, the calls under way have these seconds, so that their answers are kept."""


_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
_LONGEST_RETRY_AFTER = 600.0
"""A server that asks for a longer pause than these seconds has said no."""
_PASSING = frozenset({408, 409, 425, 429})
_NOT_REACHED = ("ConnectError", "ConnectTimeout")  # errors of httpx, or of httpx2, which newer clients of openai use


def may_pass(status: int) -> bool:
    """Return whether a response's status stands for a failure that may pass: 408, 409, 425, 429 and 5xx."""
    return status in _PASSING or status >= 500


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server asks to wait (`retry-after-ms`, or `Retry-After` in seconds or as a date)."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) / unit
        except ValueError:
            continue
        if 0 <= seconds < float("inf"):
            return seconds
    try:
        date = parsedate_to_datetime(headers.get("retry-after", ""))
    except ValueError:
        return None
    return max(0.0, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - time.time())


def back_off(retry: int) -> float:
    """Return the seconds before retry 0, 1, ...: doubled each time, and drawn at random between half and all of it.

    Without the random part, calls that failed together would come back together.
    """
    longest = min(_FIRST_WAIT * 2.0 ** min(retry, 30), _LONGEST_WAIT)
    return longest * random.uniform(0.5, 1.0)  # no result depends on it, so it has no seed


@dataclass(frozen=True)
class _Failure:
    """A failed request: what happened, whether it may pass, and the pause that the server asked for."""

    no_reply: NoReply
    useless: MlflowCompressError | None = None  # What to raise where every further call would fail too
    passing: bool = False
    wait: float | None = None
    refused: str = ""  # message of an HTTP 400 or 422, which may name a parameter
    lost: bool = False  # The server may have worked on it, and its answer did not arrive


def _refused(config: EndpointConfig, status: int, body: object, message: str, headers: Any, model: str) -> _Failure:
    """Return what an HTTP error means."""
    error = body if isinstance(body, dict) else {}
    code, said = str(error.get("code") or ""), config.clean(message)
    useless = None
    if status in (401, 403):
        # The server's message is left out, because some servers repeat the key in it.
        useless = config.error(f"{config.where} refused the key (HTTP {status})", fix=f"Check {config.key_variable}")
    elif status == 404:
        what = f"{config.where} has no model {model!r}, or is no such endpoint (HTTP 404): {said}"
        fix = f"Check {config.model_parameter}, and {config.url_parameter}: it often ends in /v1"
        useless = config.error(what, fix=fix)
    elif code == "insufficient_quota":
        useless = config.error(f"{config.where} has no credit left (HTTP {status}): {said}", fix="Then run it again")
    reason = replies.FILTERED if "content_filter" in code or "content_policy" in code else f"http_{status}"
    return _Failure(
        NoReply(reason, f"answered HTTP {status}: {said}"),
        useless=useless,
        passing=may_pass(status),
        wait=retry_after(headers),
        refused=f"{error.get('param') or ''} {message}" if status in (400, 422) else "",
    )


def _given_up(config: EndpointConfig, failure: _Failure, *, answered: bool) -> NoReply:
    """Return why a call is not made again; where the endpoint has never `answered` as one, its address is wrong."""
    tried = f"Tried {config.max_retries + 1} times"
    reason, detail = failure.no_reply.reason, f"{config.where} {failure.no_reply.detail}"
    if not answered and reason == replies.CONNECTION:
        raise config.error(detail, fix=f"{tried}. Check {config.url_parameter}")
    if not answered and reason == replies.ERROR_INSIDE:
        raise config.error(detail, fix=tried)
    if not answered and reason in (replies.NOT_JSON, replies.NOT_A_COMPLETION):
        raise config.error(detail, fix=f"Check {config.url_parameter}: it often ends in /v1")
    return NoReply(reason, f"{detail}. {tried}" if failure.passing else detail)


_MINUTE_S = 60.0


class PerMinute:
    """At most `limit` units (requests or tokens) in any minute, for calls of one event loop; 0 is no limit.

    A call that alone is larger waits for an empty minute.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: deque[tuple[float, int]] = deque()
        self._sum = 0
        self._turn = asyncio.Lock()  # first come, first served

    async def take(self, units: int) -> None:
        """Wait until there is room for `units`, and take it."""
        if self._limit == 0:
            return
        async with self._turn:
            while (wait := self._wait(units)) > 0:
                await asyncio.sleep(wait)
            self._taken.append((time.monotonic(), units))
            self._sum += units

    def _wait(self, units: int) -> float:
        now = time.monotonic()
        while self._taken and now - self._taken[0][0] >= _MINUTE_S:
            self._sum -= self._taken.popleft()[1]
        if not self._taken or self._sum + units <= self._limit:
            return 0.0
        return max(_MINUTE_S - (now - self._taken[0][0]), 0.001)


_REASONING_ROOM = 4
"""Models that want ``max_completion_tokens`` reason before they answer: room for the answer, times this."""

_LENGTH = re.compile(r"max_completion_tokens", re.IGNORECASE)
_TEMPERATURE = re.compile(r"temperature", re.IGNORECASE)
_SYSTEM = re.compile(r"system.{0,20}role|role.{0,60}system|system message", re.IGNORECASE | re.DOTALL)


@dataclass
class _Dialect:
    """The settings that one model accepts. It starts with FastChat's: temperature 0 and ``max_tokens``."""

    temperature: bool = True  # Whether temperature 0, and a system message, are sent
    length: str = "max_tokens"  # Name of the parameter that limits a reply
    system: bool = True
    settled: bool = False  # Whether the first call is over
    # Held during the first call, so that only one call finds out
    first: asyncio.Lock = field(default_factory=asyncio.Lock)

    def settings(self, max_tokens: int) -> dict[str, Any]:
        """Return the settings of a request whose visible reply may have `max_tokens` tokens."""
        room = max_tokens if self.length == "max_tokens" else _REASONING_ROOM * max_tokens
        return {**({"temperature": 0} if self.temperature else {}), self.length: room}

    def messages(self, given: Sequence[dict[str, str]]) -> list[dict[str, str]]:
        """Return the messages; where no system message is accepted, its text stands before the user's."""
        if self.system:
            return list(given)
        system = [message["content"] for message in given if message["role"] == "system"]
        others = [message for message in given if message["role"] != "system"]
        return [{**others[0], "content": "\n\n".join([*system, others[0]["content"]])}, *others[1:]]

    def described(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return what the record of a reply says about its request."""
        return settings if self.system else {**settings, "system": "in the user's message"}

    def learn(self, refusal: str) -> bool:
        """Change what the endpoint's message (of an HTTP 400 or 422) refuses. Return whether to call again."""
        if self.length == "max_tokens" and _LENGTH.search(refusal):
            self.length = "max_completion_tokens"
        elif self.temperature and _TEMPERATURE.search(refusal):
            self.temperature = False
        elif self.system and _SYSTEM.search(refusal):
            self.system = False
        else:
            return False
        return True


@cache
def _certificates() -> ssl.SSLContext:
    """Return the trusted certificates, which take 50 ms to read: a process reads them once for all its connections."""
    import httpx

    return httpx.create_ssl_context()


class Transport(AbstractContextManager["Transport"]):
    """An open connection to one endpoint, to be used as a context manager.

    The calls run in an event loop in a thread of its own, so that callers stay synchronous, in a notebook too.
    `spending` counts tokens, and holds the budget.
    """

    def __init__(self, config: EndpointConfig, spending: Spending | None = None) -> None:
        self.config = config
        self.spending = spending or Spending()
        self._dialects: dict[str, _Dialect] = {}
        self._requests = PerMinute(config.requests_per_minute)
        self._tokens = PerMinute(config.tokens_per_minute)
        self._money = asyncio.Condition()  # told when a call ends: it may leave enough for another
        self.asked_again: Counter[str] = Counter()  # Requests that were made again, by what was wrong before
        self._answered = False  # whether the endpoint has ever answered as one
        self._places = asyncio.Semaphore(config.concurrency)
        self._ending = asyncio.Event()  # Set by an error or Ctrl-C: no call begins, and none is made again

    def __enter__(self) -> Self:
        from anyio.from_thread import start_blocking_portal
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        self._client = AsyncOpenAI(
            api_key=self.config.key,
            base_url=self.config.called_url,
            default_headers=dict(self.config.headers),
            timeout=self.config.timeout,
            max_retries=0,
            http_client=DefaultAsyncHttpxClient(verify=_certificates()),
        )
        self._opened = ExitStack()
        self._loop = self._opened.enter_context(start_blocking_portal())
        self._opened.callback(self._loop.call, self._client.close)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._opened.__exit__(*raised)

    def for_all(self, function: Callable[[T], Awaitable[R]], things: Iterable[T]) -> list[R]:
        """Return an asynchronous function's results for all things, at most `concurrency` at the same time.

        After an error, or Ctrl-C, no call begins; those under way have `_ENDING_SECONDS`, and the function keeps them.
        """

        async def one(thing: T) -> R:
            async with self._places:
                if self._ending.is_set():
                    raise asyncio.CancelledError
                try:
                    return await function(thing)
                except BaseException:
                    self._ending.set()
                    raise

        async def everything() -> list[R]:
            self._ending.clear()
            tasks = [asyncio.ensure_future(one(thing)) for thing in things]
            results, ending = asyncio.gather(*tasks), asyncio.ensure_future(self._ending.wait())
            either: list[asyncio.Future[Any]] = [results, ending]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._ending.is_set():
                await asyncio.wait(tasks, timeout=_ENDING_SECONDS)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            ending.cancel()
            return results.result()

        work = self._loop.start_task_soon(everything)
        try:
            return work.result()
        except BaseException:  # Ctrl-C
            self._loop.call(self._ending.set)
            futures.wait([work])
            raise

    async def complete(self, messages: Sequence[dict[str, str]], *, model: str, max_tokens: int) -> Reply | NoReply:
        """Return a completion at temperature 0, or the reason why there is none. A model that reasons gets more room.

        Wrong key, unknown model, wrong address, no credit left: an error of the kind `config.error`, because every
        further call would be useless.
        """
        dialect = self._dialects.setdefault(model, _Dialect())
        if not dialect.settled:
            async with dialect.first:
                if not dialect.settled:
                    try:
                        return await self._try(messages, model, max_tokens, dialect)
                    finally:
                        dialect.settled = True
        return await self._try(messages, model, max_tokens, dialect)

    async def embed(self, texts: Sequence[str], *, model: str) -> Embedded | NoReply:
        """Return one vector per text, or the reason why there are none; errors as in `complete`."""
        body = {"model": model, "input": list(texts), "encoding_format": "float"}
        n_bytes = sum(len(text.encode()) for text in texts)
        return await self._retried(
            lambda: self._paced(
                "/embeddings", body, lambda said: replies.read_embeddings(said, model, len(texts)), model, n_bytes, 0
            )
        )

    async def post(
        self, path: str, body: Mapping[str, Any], read: Callable[[str], A | NoReply], *, model: str, n_bytes: int
    ) -> A | NoReply:
        """Return what `read` finds in the answer to any request, or why there is nothing; errors as in `complete`.

        `path` is below the endpoint's address, or a whole address. `n_bytes` is the length of what is sent: with
        `tokens_per_minute` it decides the pace. What `read` returns as a `NoReply` is asked again.
        """
        return await self._retried(lambda: self._paced(path, body, read, model, n_bytes, 1))

    async def _try(
        self, messages: Sequence[dict[str, str]], model: str, max_tokens: int, dialect: _Dialect
    ) -> Reply | NoReply:
        sent: dict[str, Any] = {}

        async def once() -> Reply | NoReply | _Failure:
            nonlocal sent
            settings = dialect.settings(max_tokens)
            sent = dialect.described(settings)
            own = dialect.messages(messages)
            reply = await self._paced(
                "/chat/completions",
                {"model": model, "messages": own, **settings},
                lambda body: replies.read_completion(body, model),
                model,
                prompt_bytes(own),
                settings[dialect.length],
            )
            if not isinstance(reply, Reply):
                return reply
            hidden = self.config.without_secrets
            text, reasoning = hidden(reply.text), hidden(reply.reasoning)
            return replace(reply, text=text, reasoning=reasoning, model=hidden(reply.model), sent=sent)

        def learns(refusal: str) -> bool:
            # another call has found out meanwhile, or this one does now
            return sent != dialect.described(dialect.settings(max_tokens)) or dialect.learn(refusal)

        return await self._retried(once, learns)

    async def _retried(
        self,
        once: Callable[[], Awaitable[A | NoReply | _Failure]],
        learns: Callable[[str], bool] = lambda refusal: False,
    ) -> A | NoReply:
        """Return what a call gave, which is made again while that may help, or while a refusal teaches something."""
        retry = 0
        while True:
            reply = await once()
            if not isinstance(reply, _Failure):
                return reply
            if reply.useless is not None:
                raise reply.useless
            if reply.refused and learns(reply.refused):
                continue
            pause = reply.wait if reply.wait is not None else back_off(retry)
            if not reply.passing or retry >= self.config.max_retries or pause > _LONGEST_RETRY_AFTER:
                return _given_up(self.config, reply, answered=self._answered)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause)
                return reply.no_reply
            retry += 1
            self.asked_again[reply.no_reply.reason] += 1

    async def _paced(
        self,
        path: str,
        body: Mapping[str, Any],
        read: Callable[[str], A | NoReply],
        model: str,
        n_bytes: int,
        room: int,
    ) -> A | NoReply | _Failure:
        """Return the outcome of one request, after rate limits and budget allow it.

        `n_bytes` is the length of what is sent, `room` that of the longest reply in tokens.
        """
        most = self.spending.most(model, n_bytes, room)
        async with self._money:
            await self._money.wait_for(lambda: self.spending.is_decided(most))
            if not self.spending.begin(most):
                return NoReply(replies.BUDGET, "Not asked: it could have cost more than judge_args: max_cost allows")
        outcome: A | _Failure | None = None
        sent = False
        try:
            await self._tokens.take(n_bytes // BYTES_PER_TOKEN + room)
            await self._requests.take(1)
            sent = True
            outcome = await self._request(path, body, read, model)
        finally:
            reply = None if outcome is None or isinstance(outcome, _Failure) else outcome
            # A call that timed out, was interrupted, or whose connection broke may have been worked on, and be paid.
            lost = sent and (outcome is None or (isinstance(outcome, _Failure) and outcome.lost))
            self.spending.end(model, most, reply.usage if reply else None, answered=reply is not None, lost=lost)
            async with self._money:
                self._money.notify_all()
        return outcome

    async def _request(
        self, path: str, body: Mapping[str, Any], read: Callable[[str], A | NoReply], model: str
    ) -> A | _Failure:
        import httpx
        import openai

        try:
            response = await self._client.post(path, cast_to=httpx.Response, body=dict(body))
        except openai.APITimeoutError:
            no_reply = NoReply(replies.TIMEOUT, f"did not answer within {self.config.timeout:g} s")
            return _Failure(no_reply, passing=True, lost=True)
        except openai.APIConnectionError as error:
            reason = self.config.clean(str(error.__cause__ or error))
            reached = type(error.__cause__).__name__ not in _NOT_REACHED
            return _Failure(NoReply(replies.CONNECTION, f"cannot be reached: {reason}"), passing=True, lost=reached)
        except openai.APIStatusError as error:
            return _refused(self.config, error.status_code, error.body, error.message, error.response.headers, model)
        reply = read(response.text)
        if isinstance(reply, NoReply):
            return _Failure(NoReply(reply.reason, self.config.clean(reply.detail)), passing=True)
        self._answered = True
        return reply
