"""Answers of a server: of its completions, and of its chat completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlflow_compress.errors import DataError
from mlflow_compress.files.json_text import parse_json
from mlflow_compress.transport.replies import NOT_A_COMPLETION, NOT_JSON, NoReply, Usage


@dataclass(frozen=True)
class ChatAnswer:
    """What a server has written, after a prompt or a conversation."""

    text: str
    usage: Usage | None


def read_written(body: str) -> ChatAnswer | NoReply:
    """Return the text in the body of a completion; a `NoReply` where there is none, or the body is cut off."""
    return _read(body, lambda choice: choice["text"])


def read_chat(body: str) -> ChatAnswer | NoReply:
    """Return the text in the body of a chat completion; a `NoReply` where there is none, or the body is cut off.

    A model that reasons may have written no visible text: that is an empty answer.
    """
    return _read(body, lambda choice: choice["message"]["content"] or "")


def _read(body: str, text_of: Callable[[Mapping[str, Any]], object]) -> ChatAnswer | NoReply:
    try:
        found = parse_json(body, source="the answer")
        text = text_of(found["choices"][0])
        counted = found.get("usage") or {}
        usage = Usage(int(counted["prompt_tokens"]), int(counted["completion_tokens"])) if counted else None
    except DataError:
        return NoReply(NOT_JSON, f"answered something else than JSON: {body[:80]!r}")
    except (KeyError, IndexError, TypeError, ValueError):
        return NoReply(NOT_A_COMPLETION, f"answered something else than a completion: {body[:80]!r}")
    return ChatAnswer(text, usage) if isinstance(text, str) else NoReply(NOT_A_COMPLETION, "answered no text")
