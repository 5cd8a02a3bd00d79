"""What a failed request means: whether it may pass, what was refused, and which failures end everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlflow_compress.errors import MlflowCompressError
from mlflow_compress.transport import retries
from mlflow_compress.transport.endpoint import EndpointConfig
from mlflow_compress.transport.replies import CONNECTION, FILTERED, NOT_A_COMPLETION, NOT_JSON, NoReply


@dataclass(frozen=True)
class Failure:
    """A failed request: what happened, whether it may pass, and the pause that the server asked for."""

    no_reply: NoReply
    passing: bool = False
    wait: float | None = None
    refused: str = ""  # message of an HTTP 400 or 422, which may name a parameter


def refused(
    config: EndpointConfig, status: int, body: object, message: str, headers: Any, model: str
) -> Failure | MlflowCompressError:
    """Return what an HTTP error meansx
    : useless to go on, to be tried again, or the end of this call."""
    error = body if isinstance(body, dict) else {}
    code, said = str(error.get("code") or ""), config.clean(message)
    if status in (401, 403):
        # The server's message is left out, because some servers repeat the key in it.
        return config.error(f"{config.where} refused the key (HTTP {status})", fix=f"Check {config.key_variable}")
    if status == 404:
        fix = f"Check {config.model_parameter}, and {config.url_parameter}: it often ends in /v1"
        return config.error(
            f"{config.where} has no model {model!r}, or is no such endpoint (HTTP 404): {said}", fix=fix
        )
    if code == "insufficient_quota":
        return config.error(f"{config.where} has no credit left (HTTP {status}): {said}", fix="Then run it again")
    reason = FILTERED if "content_filter" in code or "content_policy" in code else f"http_{status}"
    return Failure(
        NoReply(reason, f"answered HTTP {status}: {said}"),
        passing=retries.may_pass(status),
        wait=retries.retry_after(headers),
        refused=f"{error.get('param') or ''} {message}" if status in (400, 422) else "",
    )


def given_up(config: EndpointConfig, found: Failure, *, answered: bool) -> NoReply:
    """Return why a call is not made again.

    Raises
    ------
    MlflowCompressError
        Of the kind `config.error`. The endpoint has never `answered` as one: its address is wrong.
    """
    tried = f"Tried {config.max_retries + 1} times"
    reason, detail = found.no_reply.reason, f"{config.where} {found.no_reply.detail}"
    if not answered and reason == CONNECTION:
        raise config.error(detail, fix=f"{tried}. Check {config.url_parameter}")
    if not answered and reason in (NOT_JSON, NOT_A_COMPLETION):
        raise config.error(detail, fix=f"Check {config.url_parameter}: it often ends in /v1")
    return NoReply(reason, f"{detail}. {tried}" if found.passing else detail)
