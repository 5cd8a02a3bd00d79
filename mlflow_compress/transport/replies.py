"""Replies of an endpoint as plain values: what was said, by which model, in how many tokens, or why nothing was."""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import DataError
from mlflow_compress.files import alone_with, parse_json

T = TypeVar("T")

# Reasons why there is no rating. They are part of metric names (`judge/unscored/<reason>`).
_REFUSAL, _EMPTY, CUT, FILTERED = "refusal", "empty", "length", "content_filter"
_NO_CHOICES, NOT_JSON, NOT_A_COMPLETION = "no_choices", "not_json", "not_a_completion"
ERROR_INSIDE = "error_inside"  # HTTP 200 around an error: proxies answer so
TIMEOUT, CONNECTION, BUDGET = "timeout", "connection", "budget"


@dataclass(frozen=True)
class Usage:
    """Tokens that an endpoint counts for one reply. Reasoning tokens are part of the completion tokens."""

    prompt: int
    completion: int
    reasoning: int | None = None


class Answered(Protocol):
    """Interface of what was read from a response."""

    @property
    def usage(self) -> Usage | None:
        """Tokens that the endpoint counts for it; None if it does not count."""


@dataclass(frozen=True)
class Reply:
    """A chat completion."""

    text: str  # What was said; empty if nothing was. Reasoning is in it where the endpoint does not give it apart
    model: str  # The model that answered, as the endpoint reports it
    finish_reason: str | None = None  # Why it stopped: "stop", "length", "content_filter", ..
    # Reason why nothing can be read in it: a refusal, a filter, no text, no choices. None if there is a text.
    problem: str | None = None
    usage: Usage | None = None  # None if the endpoint does not count
    sent: Mapping[str, Any] | None = None  # The settings of the accepted request
    reasoning: str = ""  # Reasoning that the endpoint gives apart from the text


@dataclass(frozen=True)
class NoReply:
    """A call that ended without a completion: the reason in one word, and what happened as a sentence."""

    reason: str
    detail: str


class WrongReplyError(Exception):
    """A reply with a fault: its kind, and what is wrong in words."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.no_reply = NoReply(reason, detail)


def read_reply(body: str, what: str, read: Callable[[Any], T]) -> T | NoReply:
    """Return what `read` finds in the JSON of a response's body; a `NoReply` where it is not `what` was asked for.

    `read` raises a `WrongReplyError` for any other fault.
    """
    try:
        row = parse_json(body, source="the reply")
    except DataError:
        return NoReply(NOT_JSON, f"answered something else than JSON: {body[:80]!r}")
    if isinstance(row, dict) and (error := row.get("error")) and not row.get("choices") and not row.get("data"):
        message = error.get("message") if isinstance(error, dict) else None
        return NoReply(ERROR_INSIDE, f"answered HTTP 200 with an error inside: {message or error}")
    try:
        return read(row)
    except WrongReplyError as fault:
        return fault.no_reply
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):  # the last: an integer too large for a float
        return NoReply(NOT_A_COMPLETION, f"answered something else than {what}: {body[:80]!r}")


def read_usage(reply: Mapping[str, Any]) -> Usage | None:
    """Return the tokens that a completion counts; None where it counts none, an error where it counts otherwise."""
    counted = reply.get("usage") or {}
    return Usage(int(counted["prompt_tokens"]), int(counted["completion_tokens"])) if counted else None


def read_completion(body: str, model: str) -> Reply | NoReply:
    """Return the completion in a response's body; a `NoReply` if there is none in it.

    The body may be cut off, HTML, or JSON of another kind. `model` is the name of a completion that has none.
    """
    return read_reply(body, "a chat completion", lambda reply: _completion(reply, model))


def _completion(reply: Any, model: str) -> Reply:
    if not isinstance(reply, dict) or not ("choices" in reply or reply.get("object") == "chat.completion"):
        raise TypeError
    answered, usage = str(reply.get("model") or model), _usage(reply.get("usage"))
    choices = reply.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    if not isinstance(first, dict) or not isinstance(message, dict):
        return Reply("", answered, None, _NO_CHOICES, usage)
    text, reasoning = text_and_reasoning(message)
    finish = first.get("finish_reason")
    problem = _problem(text, finish, message.get("refusal"))
    return Reply(text, answered, finish, problem, usage, reasoning=reasoning)


@dataclass(frozen=True, eq=False)
class Embedded:
    """Vectors of an endpoint, shape (n, d), the model that made them, as the endpoint reports it, and the tokens."""

    vectors: npt.NDArray[np.float32]
    model: str
    usage: Usage | None


def read_embeddings(body: str, model: str, n: int) -> Embedded | NoReply:
    """Return the vectors in a response's body, in the order of the n texts; a `NoReply` if they are not in it."""
    return read_reply(body, f"{n} embeddings", lambda reply: _embedded(reply, model, n))


def _embedded(reply: Any, model: str, n: int) -> Embedded:
    rows = reply["data"]
    by_place = {row["index"]: row["embedding"] for row in rows if isinstance(row["index"], int)}
    listed = [by_place[place] for place in range(n)]
    numbers = {type(value) for vector in listed for value in vector}
    if len(rows) != n or not numbers <= {int, float}:
        raise ValueError
    vectors = np.array(listed, dtype=np.float64).astype(np.float32)  # an error where lengths differ
    if vectors.ndim != 2 or vectors.size == 0 or not np.isfinite(vectors).all():
        raise ValueError
    usage = reply.get("usage")
    prompt = _count(usage.get("prompt_tokens")) if isinstance(usage, dict) else None
    return Embedded(vectors, str(reply.get("model") or model), None if prompt is None else Usage(prompt, 0))


def _problem(text: str, finish_reason: object, refusal: object) -> str | None:
    if finish_reason == "content_filter":
        return FILTERED
    if refusal or finish_reason == "refusal":
        return _REFUSAL
    if not text.strip():
        return CUT if finish_reason == "length" else _EMPTY
    return None


# Where endpoints give reasoning apart: vLLM, SGLang and DeepSeek the first, newer vLLM and OpenRouter the others.
_REASONING = ("reasoning_content", "reasoning", "reasoning_details", "thinking")


def text_and_reasoning(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return the text of a message, and the reasoning that its endpoint gives apart; "" where there is none."""
    text, reasoning = _parts(message.get("content"))
    apart = next((given for name in _REASONING if (given := _words(message.get(name)))), "")
    return text, apart + reasoning


def _parts(content: object) -> tuple[str, str]:
    """Return a message's text and the reasoning beside it; some endpoints give both as a list of parts."""
    if not isinstance(content, list):
        return (content if isinstance(content, str) else ""), ""
    parts = [part for part in content if isinstance(part, dict)]
    text = "".join(_words(part.get("text")) for part in parts if part.get("type") in _TEXT_PARTS)
    return text, "".join(map(_words, (part for part in parts if part.get("type") not in _TEXT_PARTS)))


_TEXT_PARTS = (None, "text", "output_text")


def _words(given: object) -> str:
    """Return the text of a text, of a part, or of a list of parts; "" where there is none."""
    if isinstance(given, list):
        return "".join(map(_words, given))
    if isinstance(given, dict):
        return next((words for name in ("text", *_REASONING, "summary") if (words := _words(given.get(name)))), "")
    return given if isinstance(given, str) else ""


def _usage(counted: object) -> Usage | None:
    if not isinstance(counted, dict):
        return None
    prompt, completion = _count(counted.get("prompt_tokens")), _count(counted.get("completion_tokens"))
    if prompt is None or completion is None:
        return None
    details = counted.get("completion_tokens_details")
    return Usage(prompt, completion, _count(details.get("reasoning_tokens")) if isinstance(details, dict) else None)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def content_key(**content: Any) -> str:
    """Return the SHA-256 (hexadecimal) of everything that decides an answer: model, messages, settings, repeat."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


class ReplyCache:
    """Answers by content key, in a file or (None) in memory. A new one is on disk before `put` returns.

    A last line that is incomplete, because its process was killed, is dropped. Any other broken line is a `DataError`.
    So is an answer without one of the `fields`. Several processes may share the file. While one reads or
    writes, a lock file next to it keeps their lines complete.
    """

    def __init__(self, path: Path | None, fields: Collection[str] = ()) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._rows: dict[str, dict[str, Any]] = {}
        if path is None or not path.is_file():
            return
        with alone_with(_lock_of(path)):
            data = path.read_bytes()
        for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
            row = parse_json(line, source=f"{path}, line {number}")
            match row:
                case {"key": str(key), "value": dict(value)}:
                    self._rows[key] = value
                case _:
                    raise DataError(f"{path}, line {number}: not a stored answer", fix="Delete the file")
            if missing := [name for name in fields if name not in value]:
                problem = f"{path}, line {number}: a stored answer without {', '.join(missing)}"
                raise DataError(problem, fix="Delete the line, and what it holds is asked for again")

    def get(self, key: str) -> dict[str, Any] | None:
        return self._rows.get(key)

    def put(self, key: str, value: dict[str, Any]) -> None:
        self.put_all({key: value})

    def put_all(self, values: Mapping[str, dict[str, Any]]) -> None:
        with self._lock:
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with alone_with(_lock_of(self._path)), self._path.open("ab+") as sink:
                    _drop_unfinished_line(sink)
                    sink.writelines(json.dumps({"key": k, "value": v}).encode() + b"\n" for k, v in values.items())
                    sink.flush()
                    os.fsync(sink.fileno())
            self._rows.update(values)

    def values(self) -> list[dict[str, Any]]:
        return list(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _drop_unfinished_line(file: BinaryIO) -> None:
    """Remove an incomplete last line, which a killed process has left, before another line is appended."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
