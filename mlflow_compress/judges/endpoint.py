"""Chat completions from an OpenAI-compatible endpoint, with retries. Errors never show the key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

from mlflow_compress.errors import ConfigError, JudgeError

OPENAI_URL = "https://api.openai.com/v1"


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """Address and key of the judge, and how often requests are retried.

    Attributes
    ----------
    base_url : str
        Endpoint that speaks the chat-completions protocol, without ``/chat/completions``.
    key : str
        API key, sent as a bearer token; never shown.
    timeout : float
        Seconds for one request.
    max_retries : int
        Retries after 408, 409, 429, 5xx, a time-out or a broken connection. The waiting time is that of the server's
        Retry-After, otherwise it grows exponentially from 0.5 s.
    """

    base_url: str = OPENAI_URL
    key: str = field(repr=False)
    timeout: float = 120.0
    max_retries: int = 5

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                "The judge's base_url is not an address", allowed="http(s)://host[:port]/v1", got=self.shown_url
            )
        if not self.key or not self.key.isascii() or not self.key.isprintable():
            raise ConfigError("The judge's key is empty or has characters that no header can carry")
        if self.timeout <= 0:
            raise ConfigError("timeout must be above 0 seconds", got=self.timeout)
        if self.max_retries < 0:
            raise ConfigError("max_retries must be at least 0", got=self.max_retries)

    @property
    def shown_url(self) -> str:
        """The address without user, password and query, for messages and logs."""
        parts = urlsplit(self.base_url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


@dataclass(frozen=True)
class Completion:
    """A completion: the text, and the name of the model that the endpoint reports."""

    text: str
    model: str


class Endpoint:
    """An open connection, to be used as a context manager. Several threads may share it."""

    def __init__(self, config: EndpointConfig) -> None:
        from openai import OpenAI

        self._config = config
        self._client = OpenAI(
            api_key=config.key, base_url=config.base_url, timeout=config.timeout, max_retries=config.max_retries
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()

    def complete(self, messages: Sequence[dict[str, str]], *, model: str, max_tokens: int) -> Completion:
        """Return one completion at temperature 0.

        Raises
        ------
        JudgeError
            The endpoint cannot be reached, refuses the key or the request, still fails after the retries, or does not
            answer with a chat completion. The message has the address.
        """
        import openai

        where = f"The judge at {self._config.shown_url}"
        failed: JudgeError
        try:
            answer: Any = self._client.chat.completions.create(
                model=model,
                messages=list(messages),  # type: ignore[arg-type]
                temperature=0,
                max_tokens=max_tokens,
            )
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            # The server's message is left out, because some servers repeat the key in it.
            failed = JudgeError(f"{where} refused the key (HTTP {error.status_code})", fix="Check OPENAI_API_KEY")
        except openai.APITimeoutError:
            failed = JudgeError(f"{where} did not answer within {self._config.timeout:g} s", fix=self._tried)
        except openai.APIConnectionError as error:
            reason = self._clean(str(error.__cause__ or error))
            failed = JudgeError(f"{where} cannot be reached: {reason}", fix=f"{self._tried}. Check judge_base_url")
        except openai.APIStatusError as error:
            said = self._clean(error.message)
            failed = JudgeError(f"{where} answered HTTP {error.status_code}: {said}", fix=self._tried_if(error))
        except openai.OpenAIError as error:
            failed = JudgeError(f"{where} answered something else than a chat completion: {self._clean(str(error))}")
        else:
            return self._read(answer, model, where)
        # Outside the except clause, because a chained exception would show the server's message.
        raise failed

    def _read(self, answer: Any, model: str, where: str) -> Completion:
        choices = getattr(answer, "choices", None)
        message = getattr(choices[0], "message", None) if isinstance(choices, list) and choices else None
        if message is None:
            raise JudgeError(
                f"{where} answered something else than a chat completion",
                fix="Check judge_base_url: it often ends in /v1",
            )
        return Completion(text=self._redact(message.content or ""), model=self._redact(str(answer.model or model)))

    @property
    def _tried(self) -> str:
        return f"Tried {self._config.max_retries + 1} times"

    def _tried_if(self, error: Any) -> str | None:
        return self._tried if error.status_code in (408, 409, 429) or error.status_code >= 500 else None

    def _redact(self, text: str) -> str:
        return text.replace(self._config.key, "[key]")

    def _clean(self, text: str) -> str:
        """Return a server's message without the key, on one line of at most 300 characters."""
        return " ".join(self._redact(text).split())[:300]
