"""Address and key of an OpenAI-compatible endpoint, and how it may be called."""

import base64
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from mlflow_compress.config import JudgeSettings
from mlflow_compress.errors import ConfigError, JudgeError, MlflowCompressError

OPENAI_URL = "https://api.openai.com/v1"
_SHORTEST_SECRET = 8  # characters
_LONGEST_MESSAGE = 300


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """Address and key of an endpoint, and how often and how fast it is called."""

    # Without ``/chat/completions``; user and password in it are sent as basic authentication, and never shown
    base_url: str = field(default=OPENAI_URL, repr=False)
    key: str = field(repr=False)  # API key, sent as a bearer token; never shown
    timeout: float = 120.0  # Seconds for one request
    max_retries: int = 5  # Retries of one call after a failure that may pass; see `client.may_pass`
    concurrency: int = 16  # Number of calls at the same time
    requests_per_minute: int = 0  # Limits of the account; 0 is no limit
    tokens_per_minute: int = 0
    # What the endpoint is to us, and the names of what gives its address, model and key; for messages
    what: str = "judge"
    url_parameter: str = "judge_base_url"
    model_parameter: str = "judge_model"
    key_variable: str = "OPENAI_API_KEY"
    error: type[MlflowCompressError] = JudgeError  # What is raised where every further call would be useless

    def __post_init__(self) -> None:
        _check_url(self.base_url, self.what)
        if not self.key or not self.key.isascii() or not self.key.isprintable():
            raise ConfigError(f"The {self.what}'s key is empty or has characters that no header can carry")

    @property
    def shown_url(self) -> str:
        """The address without user, password and query, for messages and logs."""
        return shown_url(self.base_url)

    @property
    def where(self) -> str:
        """What and where the endpoint is, for messages."""
        return f"The {self.what} at {self.shown_url}"

    @property
    def called_url(self) -> str:
        """The address without user and password. HTTP libraries log the addresses that they call."""
        parts = urlsplit(self.base_url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, parts.query, ""))

    @property
    def root(self) -> str:
        """The called address without ``/v1``: where servers have pages of their own."""
        return self.called_url.rstrip("/").removesuffix("/v1")

    @property
    def headers(self) -> Mapping[str, str]:
        """Basic authentication, where the address has a user; it takes the place of the bearer token."""
        parts = urlsplit(self.base_url)
        if parts.username is None:
            return {}
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        return {"Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}

    def without_secrets(self, text: str) -> str:
        """Return a text in which key and password are replaced, should a server have repeated them.

        Shorter ones than eight characters are no secrets but placeholders ("1", "EMPTY"), which occur in any text: cut
        out of a reply, they would take its rating away.
        """
        password = urlsplit(self.base_url).password
        secrets = {self.key: "[key]", password: "[password]", unquote(password or ""): "[password]"}
        for secret, shown in secrets.items():
            if secret and len(secret) >= _SHORTEST_SECRET:
                text = text.replace(secret, shown)
        return text

    def clean(self, text: str) -> str:
        """Return a server's message without secrets, on one line of at most 300 characters."""
        return " ".join(self.without_secrets(text).split())[:_LONGEST_MESSAGE]


def call_limits(settings: object) -> dict[str, Any]:
    """Return the limits of calls from the parameters of judges, by the names that `EndpointConfig` has for them."""
    names = ("timeout", "max_retries", "concurrency", "requests_per_minute", "tokens_per_minute")
    return {name: getattr(settings, f"judge_{name}") for name in names}


def shown_url(url: str) -> str:
    """Return an address without user, password and query."""
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets that are no IPv6 address; `_check_url` refuses them
        return url.rpartition("@")[2].partition("?")[0]
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _check_url(url: str, what: str) -> None:
    """Refuse what is no address of an endpoint, such as one with the port 99999; user and password are not shown."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        allowed = "http(s)://host[:port]/v1, with a port from 1 to 65535"
        raise ConfigError(f"The {what}'s base_url is not an address", allowed=allowed, got=shown_url(url))


SERVED_VARIABLE = "ENDPOINT_BASE_URL"
"""Environment variable with the whole address of a server of models, whose user and password no run may show."""

VARIABLES = {"judge_base_url": "OPENAI_BASE_URL", "encoder_base_url": "ENCODER_BASE_URL"}
"""Parameters that hold an address, and the environment variable of each."""


def whole_address(parameter: str, value: str) -> str:
    """Return an address with the user and password that its environment variable may add to it."""
    there = os.environ.get(VARIABLES[parameter], "").strip()
    return there if there and value == shown_url(there) else value


def check_served_address(parameter: str, address: str) -> None:
    """Refuse the address of a server of models with user, password or query, before it is noted anywhere."""
    if address != shown_url(address):
        recorded = ", and delete this run, which `mlflow run` has made with it" if "MLFLOW_RUN_ID" in os.environ else ""
        raise ConfigError(
            f"Parameter {parameter!r} holds a user, a password or a query, which runs would show",
            got=shown_url(address),
            fix=f"Give the address without them, and the whole one in the environment variable {SERVED_VARIABLE}; or a "
            f"key in ENDPOINT_API_KEY{recorded}",
        )


def check_address(settings: JudgeSettings) -> None:
    """Refuse an address with user, password or query that ``mlflow run`` has recorded before this package saw it."""
    for parameter, url in _with_secrets(settings).items():
        if "MLFLOW_RUN_ID" in os.environ:
            raise ConfigError(
                f"{parameter} holds a user, a password or a query, and `mlflow run` has recorded it in this run",
                got=shown_url(url),
                fix=f"Put the whole address into the environment variable {VARIABLES[parameter]}, and delete this run",
            )


@contextmanager
def without_password(settings: JudgeSettings) -> Iterator[JudgeSettings]:
    """Give the parameters with addresses that may be recorded: without user, password and query.

    Until the block ends, the environment holds the whole addresses, for the processes of the stages.
    """
    check_address(settings)
    secret = _with_secrets(settings)
    before = {VARIABLES[parameter]: os.environ.get(VARIABLES[parameter]) for parameter in secret}
    os.environ.update({VARIABLES[parameter]: url for parameter, url in secret.items()})
    try:
        yield settings.with_values(**{parameter: shown_url(url) for parameter, url in secret.items()})
    finally:
        for variable, value in before.items():
            del os.environ[variable]
            if value is not None:
                os.environ[variable] = value


def _with_secrets(settings: JudgeSettings) -> dict[str, str]:
    """Return the addresses that hold more than may be recorded, by parameter."""
    urls = {
        "judge_base_url": settings.judging.judge_base_url,
        "encoder_base_url": settings.answers.encoder_base_url,
    }
    return {parameter: url for parameter, url in urls.items() if url is not None and url != shown_url(url)}
