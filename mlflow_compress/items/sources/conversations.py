"""Logged conversations: chat logs in OpenAI's format of messages, cleaned before anything else sees them."""

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.items.sources.question_files import MAX_CHARS, read_jsonl, read_text
from mlflow_compress.tool_calls import check_tools, gold_calls

logger = logging.getLogger(__name__)

P = TypeVar("P", "LoggedAnswer", "ToolPrompt")
Message = dict[str, str]
"""Role and content."""

_ROLES = ("system", "developer", "user", "assistant")
PATTERNS = {
    "email": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
    "url": r"\b(?:https?://|www\.)[^\s<>\"')\]]+",
    "ip": r"\b(?:\d{1,3}\.){3}\d{1,3}\b|\b(?:[0-9A-Fa-f]{1,4}:){7}[0-9A-Fa-f]{1,4}\b",
    "iban": r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,4})?\b",
    "phone": r"(?<![\w.])(?:\+|00)?\(?\d(?:[ ()./-]{0,2}\d){7,14}(?![\w])",
}
"""What can be cleaned by name. Later patterns see what earlier ones have left."""


@dataclass(frozen=True)
class Redaction:
    """Patterns that are replaced in every text, by the name in brackets."""

    patterns: tuple[tuple[str, re.Pattern[str]], ...] = ()

    @classmethod
    def of(cls, spec: str) -> "Redaction":
        """Return the patterns of a comma-separated list of names of `PATTERNS`, and of files with one on each line."""
        named: dict[str, re.Pattern[str]] = {}
        for part in filter(None, map(str.strip, spec.split(","))):
            if part in PATTERNS:
                named[part] = re.compile(PATTERNS[part])
            elif Path(part).is_file():
                for number, line in enumerate(read_text(Path(part)).splitlines(), start=1):
                    if line.strip():
                        named[f"{part}, line {number}"] = _compiled(line, f"{part}, line {number}")
            else:
                raise ConfigError(
                    "Parameter 'redact' names neither a pattern nor a file", allowed=[*PATTERNS, "a file"], got=part
                )
        ordered = sorted(named, key=lambda name: list(PATTERNS).index(name) if name in PATTERNS else -1)
        return cls(tuple((name if name in PATTERNS else "redacted", named[name]) for name in ordered))

    def __call__(self, text: str) -> str:
        for name, pattern in self.patterns:
            text = pattern.sub(f"[{name}]", text)
        return text


def _compiled(line: str, place: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(line)
    except re.error as error:
        raise ConfigError(f"{place}: no regular expression: {error}", got=line) from error
    if pattern.search(""):
        raise ConfigError(f"{place}: the pattern matches a text without characters", got=line)
    return pattern


@dataclass(frozen=True, kw_only=True)
class LoggedAnswer:
    """One answer of an assistant, with the messages before it."""

    answer_id: str  # A digest of messages and answer: equal ones are one
    conversation: str  # A digest of the whole conversation
    category: str
    messages: tuple[Message, ...]
    answer: str


def cleaned(messages: Sequence[Mapping[str, Any]], redact: Redaction) -> list[Message | None]:
    """Return messages with redacted texts; None for one that is not text of one of the `_ROLES`."""
    turns: list[Message | None] = []
    for message in messages:
        text = _text(message.get("content"))
        usable = message.get("role") in _ROLES and text is not None and not message.get("tool_calls")
        turns.append({"role": str(message["role"]), "content": redact(text)} if usable and text is not None else None)
    return turns


def _text(content: object) -> str | None:
    """Return the text of a message, whose parts may be listed; None where any of it is no text."""
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content
        ]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    return content if isinstance(content, str) and content.strip() else None


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class ToolPrompt:
    """What a model is asked where it has tools."""

    answer_id: str  # A digest of tools, messages and answer: equal ones are one
    conversation: str  # A digest of the whole conversation
    category: str
    messages: tuple[dict[str, Any], ...]  # The arguments of earlier calls are objects
    tools: tuple[dict[str, Any], ...]
    calls: list[dict[str, Any]] | None  # Of the answer that stands there, empty where it is text; None without one

    @property
    def question(self) -> str:
        """What the user said last."""
        return next(str(m["content"]) for m in reversed(self.messages) if m["role"] == "user")


def answers_of(path: Path, redact: Redaction) -> list[LoggedAnswer]:
    """Return every answer of a file of conversations, one JSON object with `messages` a line, without repeated ones.

    A `category` or a text `id` beside them are read and redacted too. Left out, and counted in the log, are answers
    that are no text, or that come after a message which is none: images, and calls of tools where the line has no
    `tools`. Lines with `tools` are those of `tool_prompts_of`.
    """
    return list(_read(path, path.stat().st_mtime_ns if path.is_file() else 0, redact)[0])


def tool_prompts_of(path: Path, redact: Redaction) -> list[ToolPrompt]:
    """Return the prompts of lines with `tools`: one before each answer, and one where a line ends without answer."""
    return list(_read(path, path.stat().st_mtime_ns if path.is_file() else 0, redact)[1])


@lru_cache(maxsize=4)
def _read(path: Path, changed: int, redact: Redaction) -> tuple[tuple[LoggedAnswer, ...], tuple[ToolPrompt, ...]]:
    """Return what is in a file that was `changed` then: it is checked early, and read again soon."""
    answers: dict[str, LoggedAnswer] = {}
    prompts: dict[str, ToolPrompt] = {}
    skipped: Counter[str] = Counter()
    for row in read_jsonl(path):
        place, messages = f"{path}, line {row['line']}: ", row.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
            raise DataError(f"{place}'messages' must be a list of messages", allowed="OpenAI's format", got=messages)
        category = row.get("category") or ""
        if not isinstance(category, str):
            raise DataError(f"{place}'category' must be a text", got=category)
        if any(isinstance(one.get("content"), str) and len(one["content"]) > MAX_CHARS for one in messages):
            raise DataError(f"{place}a message is too long", allowed=f"at most {MAX_CHARS:,} characters")
        if row.get("tools"):
            try:
                check_tools(row["tools"])
                read = _tool_prompts(row["tools"], messages, redact(category), redact)
            except DataError as error:
                raise DataError(f"{place}{error}") from error
            prompts.update((prompt.answer_id, prompt) for prompt in read)
            continue
        for one in _answers(cleaned(messages, redact), redact(category), skipped):
            skipped["said before"] += one.answer_id in answers
            answers.setdefault(one.answer_id, one)
    if not answers and not prompts:
        raise DataError("No answer of these conversations can be used", got=f"{path} ({_counts(skipped)})")
    if +skipped:
        logger.warning("%s: %d answers are measured; left out: %s", path.name, len(answers), _counts(skipped))
    return tuple(answers.values()), tuple(prompts.values())


def _tool_prompts(tools: list[Any], messages: Sequence[Any], category: str, redact: Redaction) -> list[ToolPrompt]:
    if not any(message.get("role") == "user" for message in messages):
        raise DataError("no message is a user's", allowed="a message with the role 'user' before the answer")
    read = [_with_calls(message, redact) for message in messages]
    conversation = _digest([tools, read])
    ends = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    if messages[-1]["role"] != "assistant":
        ends.append(len(messages))
    prompts = []
    for end in ends:
        if any(message["role"] == "user" for message in read[:end]):
            calls = [call["function"] for call in read[end].get("tool_calls", [])] if end < len(read) else None
            prompts.append(
                ToolPrompt(
                    answer_id=_digest([tools, read[: end + 1]]),
                    conversation=conversation,
                    category=category,
                    messages=tuple(read[:end]),
                    tools=tuple(tools),
                    calls=calls,
                )
            )
    return prompts


def _with_calls(message: Mapping[str, Any], redact: Redaction) -> dict[str, Any]:
    """Return a message of a conversation with tools, with redacted texts and arguments."""
    calls = gold_calls(message)
    text = _text(message.get("content"))
    if message.get("role") not in (*_ROLES, "tool") or (text is None and not calls):
        raise DataError(
            "a message has neither text nor calls, or no role that is known", allowed=f"{_ROLES} and tool", got=message
        )
    read: dict[str, Any] = {"role": message["role"], "content": redact(text or "")}
    if calls:
        read["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": _redacted(call.arguments, redact)}}
            for call in calls
        ]
    return read | {name: message[name] for name in ("tool_call_id", "name") if name in message}


def _redacted(value: Any, redact: Redaction) -> Any:
    if isinstance(value, list):
        return [_redacted(one, redact) for one in value]
    if isinstance(value, dict):
        return {name: _redacted(one, redact) for name, one in value.items()}
    return redact(value) if isinstance(value, str) else value


def _counts(skipped: Counter[str]) -> str:
    return ", ".join(f"{n} {why}" for why, n in sorted((+skipped).items())) or "no message of an assistant"


def _answers(messages: Sequence[Message | None], category: str, skipped: Counter[str]) -> Iterator[LoggedAnswer]:
    conversation = _digest(messages)
    before: list[Message] = []
    for number, message in enumerate(messages):
        if message is None:
            skipped["with or after what is no text"] += 1 + sum(
                later is not None and later["role"] == "assistant" for later in messages[number + 1 :]
            )
            return
        if message["role"] == "assistant":
            if before and any(one["role"] == "user" for one in before):
                yield LoggedAnswer(
                    answer_id=_digest([*before, message]),
                    conversation=conversation,
                    category=category,
                    messages=tuple(before),
                    answer=message["content"],
                )
            else:
                skipped["before any question"] += 1
        before.append(message)


def smallest_digests(answers: Sequence[P], limit: int) -> list[P]:
    """Return the `limit` answers of each category with the smallest digests, 0 all of them.

    So the sample depends on what was said alone, and of a log that has grown most of it is the same.
    """
    taken: Counter[str] = Counter()
    chosen = []
    for one in sorted(answers, key=lambda one: one.answer_id):
        taken[one.category] += 1
        if not limit or taken[one.category] <= limit:
            chosen.append(one)
    return chosen
