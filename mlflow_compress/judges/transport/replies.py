"""Replies of an endpoint as plain values: what was said, by which model, in how many tokens, or why nothing was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Reasons why there is no rating. They are part of metric names (`judge/unscored/<reason>`).
REFUSAL, EMPTY, CUT, FILTERED = "refusal", "empty", "length", "content_filter"
NO_CHOICES, NOT_JSON, NOT_A_COMPLETION = "no_choices", "not_json", "not_a_completion"
TIMEOUT, CONNECTION, BUDGET = "timeout", "connection", "budget"


@dataclass(frozen=True)
class Usage:
    """Tokens that an endpoint counts for one reply. Reasoning tokens are part of the completion tokens."""

    prompt: int
    completion: int
    reasoning: int | None = None


@dataclass(frozen=True)
class Reply:
    """A chat completion.

    Attributes
    ----------
    text : str
        What was said; empty if nothing was.
    model : str
        The model that answered, as the endpoint reports it.
    finish_reason : str or None
        Why it stopped: "stop", "length", "content_filter", ...
    problem : str or None
        Reason why nothing can be read in it: a refusal, a filter, no text, no choices. None if there is a text.
    usage : Usage or None
        None if the endpoint does not count.
    sent : mapping of str to (int, float or str)
        The settings of the accepted request.
    """

    text: str
    model: str
    finish_reason: str | None = None
    problem: str | None = None
    usage: Usage | None = None
    sent: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class NoReply:
    """A call that ended without a completion: the reason in one word, and what happened as a sentence."""

    reason: str
    detail: str


def read_completion(body: str, model: str) -> Reply | NoReply:
    """Return the completion in a response's body; a `NoReply` if there is none in it.

    Parameters
    ----------
    body : str
        The response as it came: perhaps cut off, HTML, or JSON of another kind.
    model : str
        The model that was asked: the name of a completion that has none.
    """
    try:
        found = json.loads(body)
    except ValueError:
        return NoReply(NOT_JSON, f"answered something else than JSON: {body[:80]!r}")
    if not isinstance(found, dict) or not ("choices" in found or found.get("object") == "chat.completion"):
        return NoReply(NOT_A_COMPLETION, f"answered something else than a chat completion: {body[:80]!r}")
    answered, usage = str(found.get("model") or model), _usage(found.get("usage"))
    choices = found.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    if not isinstance(first, dict) or not isinstance(message, dict):
        return Reply("", answered, None, NO_CHOICES, usage)
    text, finish = _text(message.get("content")), first.get("finish_reason")
    return Reply(text, answered, finish, _problem(text, finish, message.get("refusal")), usage)


def _problem(text: str, finish_reason: object, refusal: object) -> str | None:
    if finish_reason == "content_filter":
        return FILTERED
    if refusal or finish_reason == "refusal":
        return REFUSAL
    if not text.strip():
        return CUT if finish_reason == "length" else EMPTY
    return None


def _text(content: object) -> str:
    """Return a message's text; some endpoints give it in parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _usage(given: object) -> Usage | None:
    if not isinstance(given, dict):
        return None
    prompt, completion = _count(given.get("prompt_tokens")), _count(given.get("completion_tokens"))
    if prompt is None or completion is None:
        return None
    details = given.get("completion_tokens_details")
    return Usage(prompt, completion, _count(details.get("reasoning_tokens")) if isinstance(details, dict) else None)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
