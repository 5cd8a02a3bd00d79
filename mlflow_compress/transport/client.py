"""Asynchronous calls behind a synchronous interface: many at once, each retried while it may help."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from mlflow_compress.errors import MlflowCompressError
from mlflow_compress.transport import retries
from mlflow_compress.transport.dialect import Dialect
from mlflow_compress.transport.endpoint import EndpointConfig
from mlflow_compress.transport.event_loop import LoopInThread
from mlflow_compress.transport.failures import Failure, given_up, refused
from mlflow_compress.transport.pacing import PerMinute
from mlflow_compress.transport.replies import (
    BUDGET,
    CONNECTION,
    TIMEOUT,
    Answered,
    Embedded,
    NoReply,
    Reply,
    read_completion,
    read_embeddings,
)
from mlflow_compress.transport.spending import BYTES_PER_TOKEN, Spending, prompt_bytes

T = TypeVar("T")
R = TypeVar("R")
A = TypeVar("A", bound=Answered)


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
        self._dialects: dict[str, Dialect] = {}
        self._requests = PerMinute(config.requests_per_minute)
        self._tokens = PerMinute(config.tokens_per_minute)
        self._money = asyncio.Condition()  # told when a call ends: it may leave enough for another
        self._answered = False  # whether the endpoint has ever answered as one
        self._loop = LoopInThread(config.concurrency)

    def __enter__(self) -> Self:
        from openai import AsyncOpenAI

        self._client = AsyncOpenAI(
            api_key=self.config.key,
            base_url=self.config.called_url,
            default_headers=dict(self.config.headers),
            timeout=self.config.timeout,
            max_retries=0,
        )
        self._loop.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.stop(self._client.close)

    def for_all(self, function: Callable[[T], Awaitable[R]], things: Iterable[T]) -> list[R]:
        """Return an asynchronous function's results for all things, at most `concurrency` at the same time."""
        return self._loop.for_all(function, things)

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
        MlflowCompressError
            Of the kind `config.error`. Every further call would be useless: wrong key, unknown model, wrong address, no
            credit left.
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

    async def embed(self, texts: Sequence[str], *, model: str) -> Embedded | NoReply:
        """Return one vector per text, or the reason why there are none.

        Raises
        ------
        MlflowCompressError
            As `complete`.
        """

        async def once() -> Embedded | NoReply | Failure:
            n_bytes = sum(len(text.encode()) for text in texts)
            return await self._paced(
                lambda: self._client.embeddings.with_raw_response.create(
                    model=model, input=list(texts), encoding_format="float"
                ),
                lambda body: read_embeddings(body, model, len(texts)),
                model,
                n_bytes,
                0,
            )

        return await self._retried(once, lambda refusal: False)

    async def post(
        self, path: str, body: Mapping[str, Any], read: Callable[[str], A | NoReply], *, model: str, n_bytes: int
    ) -> A | NoReply:
        """Return what `read` finds in the answer to any request, or the reason why there is none.

        Parameters
        ----------
        path : str
            Below the endpoint's address, or a whole address.
        body : mapping
            What is sent, as JSON.
        read : callable (body)
            Reads the response; a `NoReply` is asked again.
        model : str
            The model that is asked.
        n_bytes : int
            Length of what is sent in bytes; with `tokens_per_minute` it decides the pace.

        Raises
        ------
        MlflowCompressError
            As `complete`.
        """
        import httpx

        async def once() -> A | NoReply | Failure:
            return await self._paced(
                lambda: self._client.post(path, cast_to=httpx.Response, body=dict(body)),
                read,
                model,
                n_bytes,
                1,
            )

        return await self._retried(once, lambda refusal: False)

    async def _try(
        self, messages: Sequence[dict[str, str]], model: str, max_tokens: int, dialect: Dialect
    ) -> Reply | NoReply:
        sent: dict[str, Any] = {}

        async def once() -> Reply | NoReply | Failure:
            nonlocal sent
            settings = dialect.settings(max_tokens)
            sent = dialect.described(settings)
            own = dialect.messages(messages)
            room = int(settings.get("max_tokens") or settings["max_completion_tokens"])
            found = await self._paced(
                lambda: self._client.chat.completions.with_raw_response.create(
                    model=model,
                    messages=list(own),  # type: ignore[arg-type]
                    **settings,
                ),
                lambda body: read_completion(body, model),
                model,
                prompt_bytes(own),
                room,
            )
            if not isinstance(found, Reply):
                return found
            hidden = self.config.without_secrets
            return replace(found, text=hidden(found.text), model=hidden(found.model), sent=sent)

        def learns(refusal: str) -> bool:
            # another call has found out meanwhile, or this one does now
            return sent != dialect.described(dialect.settings(max_tokens)) or dialect.learn(refusal)

        return await self._retried(once, learns)

    async def _retried(
        self, once: Callable[[], Awaitable[A | NoReply | Failure]], learns: Callable[[str], bool]
    ) -> A | NoReply:
        """Return what a call gave, which is made again while that may help, or while a refusal teaches something."""
        retry = 0
        while True:
            found = await once()
            if not isinstance(found, Failure):
                return found
            if found.refused and learns(found.refused):
                continue
            pause = found.wait if found.wait is not None else retries.back_off(retry)
            if not found.passing or retry >= self.config.max_retries or pause > retries.LONGEST_RETRY_AFTER:
                return given_up(self.config, found, answered=self._answered)
            retry += 1
            await asyncio.sleep(pause)

    async def _paced(
        self,
        send: Callable[[], Awaitable[Any]],
        read: Callable[[str], A | NoReply],
        model: str,
        n_bytes: int,
        room: int,
    ) -> A | NoReply | Failure:
        """Return the outcome of one request, after rate limits and budget allow it.

        Parameters
        ----------
        send : callable () -> awaitable
            Makes the request.
        read : callable (body)
            Reads the response.
        model : str
            The model that is asked.
        n_bytes, room : int
            Length of what is sent in bytes, and of the longest reply in tokens.
        """
        most = self.spending.most(model, n_bytes, room)
        async with self._money:
            await self._money.wait_for(lambda: self.spending.is_decided(most))
            if not self.spending.begin(most):
                return NoReply(BUDGET, "Not asked: it could have cost more than judge_max_cost allows")
        found: A | Failure | None = None
        try:
            await self._tokens.take(n_bytes // BYTES_PER_TOKEN + room)
            await self._requests.take(1)
            found = await self._request(send, read, model)
        finally:
            reply = None if found is None or isinstance(found, Failure) else found
            self.spending.end(model, most, reply.usage if reply else None, answered=reply is not None)
            async with self._money:
                self._money.notify_all()
        return found

    async def _request(
        self, send: Callable[[], Awaitable[Any]], read: Callable[[str], A | NoReply], model: str
    ) -> A | Failure:
        import openai

        fatal: MlflowCompressError
        try:
            raw = await send()
        except openai.APITimeoutError:
            return Failure(NoReply(TIMEOUT, f"did not answer within {self.config.timeout:g} s"), passing=True)
        except openai.APIConnectionError as error:
            reason = self.config.clean(str(error.__cause__ or error))
            return Failure(NoReply(CONNECTION, f"cannot be reached: {reason}"), passing=True)
        except openai.APIStatusError as error:
            failed = refused(self.config, error.status_code, error.body, error.message, error.response.headers, model)
            if isinstance(failed, Failure):
                return failed
            fatal = failed
        else:
            found = read(getattr(raw, "http_response", raw).text)
            if isinstance(found, NoReply):
                return Failure(NoReply(found.reason, self.config.clean(found.detail)), passing=True)
            self._answered = True
            return found
        # Outside the except clause, because a chained exception would show the server's message, and so the key.
        raise fatal
