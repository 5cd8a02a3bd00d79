"""Asynchronous chat completions behind a synchronous interface: many calls at once, each retried while it may help."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeVar

from mlflow_compress.errors import JudgeError
from mlflow_compress.judges.transport import retries
from mlflow_compress.judges.transport.dialect import Dialect
from mlflow_compress.judges.transport.endpoint import EndpointConfig
from mlflow_compress.judges.transport.pacing import PerMinute
from mlflow_compress.judges.transport.replies import (
    BUDGET,
    CONNECTION,
    FILTERED,
    NOT_A_COMPLETION,
    NOT_JSON,
    TIMEOUT,
    NoReply,
    Reply,
    read_completion,
)
from mlflow_compress.judges.transport.spending import BYTES_PER_TOKEN, Spending, prompt_bytes

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class _Failure:
    """A failed request: what happened, whether it may pass, and the pause that the server asked for."""

    no_reply: NoReply
    passing: bool = False
    wait: float | None = None
    refused: str = ""  # message of an HTTP 400 or 422, which may name a parameter


class Transport:
    """An open connection to one endpoint, to be used as a context manager.

    The calls run in an event loop in a thread of its own, so that callers stay synchronous, in a notebook too.

    Parameters
    ----------
    config : EndpointConfig
    spending : Spending, optional
        Counts tokens, and holds the budget.
    """

    def __init__(self, config: EndpointConfig, spending: Spending | None = None) -> None:
        self.config = config
        self.spending = spending or Spending()
        self._where = f"The judge at {config.shown_url}"
        self._dialects: dict[str, Dialect] = {}
        self._requests = PerMinute(config.requests_per_minute)
        self._tokens = PerMinute(config.tokens_per_minute)
        self._places = asyncio.Semaphore(config.concurrency)
        self._money = asyncio.Condition()  # told when a call ends: it may leave enough for another
        self._answered = False  # whether the endpoint has ever answered as one
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judge", daemon=True)

    def __enter__(self) -> Self:
        from openai import AsyncOpenAI

        self._client = AsyncOpenAI(
            api_key=self.config.key,
            base_url=self.config.called_url,
            default_headers=dict(self.config.headers),
            timeout=self.config.timeout,
            max_retries=0,
        )
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._wait_for(self._end())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def for_all(self, function: Callable[[T], Awaitable[R]], things: Iterable[T]) -> list[R]:
        """Return an asynchronous function's results for all things, at most `concurrency` at the same time.

        An error, or Ctrl-C, ends the calls under way; what other calls have returned before is the function's to keep.
        """

        async def one(thing: T) -> R:
            async with self._places:
                return await function(thing)

        async def everything() -> list[R]:
            tasks = [asyncio.ensure_future(one(thing)) for thing in things]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        return self._wait_for(everything())

    async def _end(self) -> None:
        """End what an interruption has left, and close the connections."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._client.close()

    def _wait_for(self, work: Coroutine[Any, Any, R]) -> R:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C; `__exit__` waits for the calls to end
            raise

    async def complete(self, messages: Sequence[dict[str, str]], *, model: str, max_tokens: int) -> Reply | NoReply:
        """Return a completion at temperature 0, or the reason why there is none.

        Parameters
        ----------
        messages : sequence of dict
            The chat messages.
        model : str
            The model that is asked.
        max_tokens : int
            Longest visible reply; a model that reasons gets more room.

        Raises
        ------
        JudgeError
            Every further call would be useless: wrong key, unknown model, wrong address, no credit left.
        """
        dialect = self._dialects.setdefault(model, Dialect())
        if not dialect.settled:
            async with dialect.first:
                if not dialect.settled:
                    try:
                        return await self._try(messages, model, max_tokens, dialect)
                    finally:
                        dialect.settled = True
        return await self._try(messages, model, max_tokens, dialect)

    async def _try(
        self, messages: Sequence[dict[str, str]], model: str, max_tokens: int, dialect: Dialect
    ) -> Reply | NoReply:
        retry = 0
        while True:
            sent = dialect.described(dialect.settings(max_tokens))
            found = await self._once(dialect.messages(messages), model, dialect.settings(max_tokens))
            if not isinstance(found, _Failure):
                return replace(found, sent=sent) if isinstance(found, Reply) else found
            if found.refused and (
                sent != dialect.described(dialect.settings(max_tokens)) or dialect.learn(found.refused)
            ):
                continue  # another call has found out meanwhile, or this one has
            pause = found.wait if found.wait is not None else retries.back_off(retry)
            if not found.passing or retry >= self.config.max_retries or pause > retries.LONGEST_RETRY_AFTER:
                return self._given_up(found)
            retry += 1
            await asyncio.sleep(pause)

    def _given_up(self, found: _Failure) -> NoReply:
        """Return the reason. An endpoint that has never answered as one has a wrong address, which is an error."""
        tried = f"Tried {self.config.max_retries + 1} times"
        reason, detail = found.no_reply.reason, found.no_reply.detail
        if not self._answered and reason == CONNECTION:
            raise JudgeError(f"{self._where} {detail}", fix=f"{tried}. Check judge_base_url")
        if not self._answered and reason in (NOT_JSON, NOT_A_COMPLETION):
            raise JudgeError(f"{self._where} {detail}", fix="Check judge_base_url: it often ends in /v1")
        return NoReply(reason, f"{self._where} {detail}. {tried}" if found.passing else f"{self._where} {detail}")

    async def _once(
        self, messages: Sequence[dict[str, str]], model: str, settings: dict[str, Any]
    ) -> Reply | NoReply | _Failure:
        """Return the outcome of one request, after rate limits and budget allow it."""
        n_bytes, room = prompt_bytes(messages), int(settings.get("max_tokens") or settings["max_completion_tokens"])
        most = self.spending.most(model, n_bytes, room)
        async with self._money:
            await self._money.wait_for(lambda: self.spending.is_decided(most))
            if not self.spending.begin(most):
                return NoReply(BUDGET, "Not asked: it could have cost more than judge_max_cost allows")
        found: Reply | _Failure | None = None
        try:
            await self._tokens.take(n_bytes // BYTES_PER_TOKEN + room)
            await self._requests.take(1)
            found = await self._request(messages, model, settings)
        finally:
            reply = found if isinstance(found, Reply) else None
            self.spending.end(model, most, reply.usage if reply else None, answered=reply is not None)
            async with self._money:
                self._money.notify_all()
        return found

    async def _request(
        self, messages: Sequence[dict[str, str]], model: str, settings: dict[str, Any]
    ) -> Reply | _Failure:
        import openai

        fatal: JudgeError
        try:
            raw = await self._client.chat.completions.with_raw_response.create(
                model=model,
                messages=list(messages),  # type: ignore[arg-type]
                **settings,
            )
        except openai.APITimeoutError:
            return _Failure(NoReply(TIMEOUT, f"did not answer within {self.config.timeout:g} s"), passing=True)
        except openai.APIConnectionError as error:
            reason = self.config.clean(str(error.__cause__ or error))
            return _Failure(NoReply(CONNECTION, f"cannot be reached: {reason}"), passing=True)
        except openai.APIStatusError as error:
            failed = self._refused(error.status_code, error.body, error.message, error.response.headers, model)
            if isinstance(failed, _Failure):
                return failed
            fatal = failed
        else:
            return self._read(raw.http_response.text, model)
        # Outside the except clause, because a chained exception would show the server's message, and so the key.
        raise fatal

    def _read(self, body: str, model: str) -> Reply | _Failure:
        found = read_completion(body, model)
        if isinstance(found, NoReply):
            return _Failure(NoReply(found.reason, self.config.clean(found.detail)), passing=True)
        self._answered = True
        hidden = self.config.without_secrets
        return replace(found, text=hidden(found.text), model=hidden(found.model))

    def _refused(self, status: int, body: object, message: str, headers: Any, model: str) -> _Failure | JudgeError:
        """Return what an HTTP error means: useless to go on, to be tried again, or the end of this call."""
        error = body if isinstance(body, dict) else {}
        code, said = str(error.get("code") or ""), self.config.clean(message)
        if status in (401, 403):
            # The server's message is left out, because some servers repeat the key in it.
            return JudgeError(f"{self._where} refused the key (HTTP {status})", fix="Check OPENAI_API_KEY")
        if status == 404:
            fix = "Check judge_model, and judge_base_url: it often ends in /v1"
            return JudgeError(
                f"{self._where} has no model {model!r}, or is no such endpoint (HTTP 404): {said}", fix=fix
            )
        if code == "insufficient_quota":
            return JudgeError(f"{self._where} has no credit left (HTTP {status}): {said}", fix="Then run it again")
        reason = FILTERED if "content_filter" in code or "content_policy" in code else f"http_{status}"
        refused = f"{error.get('param') or ''} {message}" if status in (400, 422) else ""
        return _Failure(
            NoReply(reason, f"answered HTTP {status}: {said}"),
            passing=retries.may_pass(status),
            wait=retries.retry_after(headers),
            refused=refused,
        )
