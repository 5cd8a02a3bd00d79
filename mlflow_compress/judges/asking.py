"""Asks a judge model question by question until its reply can be read. Every paid reply is kept, and asked for once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlflow_compress.errors import ConfigError
from mlflow_compress.judges.parsing import NO_RATING, Read
from mlflow_compress.judges.prompts import Prompt
from mlflow_compress.transport.client import Transport
from mlflow_compress.transport.endpoint import EndpointConfig
from mlflow_compress.transport.replies import CUT, FILTERED, NoReply, Reply
from mlflow_compress.transport.reply_cache import ReplyCache, content_key
from mlflow_compress.transport.spending import Spending, prompt_bytes


@dataclass(frozen=True, kw_only=True)
class AskingConfig:
    """Which model is asked, and how. Temperature 0 where the model accepts it.

    Attributes
    ----------
    endpoint : EndpointConfig
        Address and key of the judge.
    model : str
        Name of the judge model.
    attempts : int
        Number of replies per judgment until one can be read. After that, the judgment counts as unscored.
    max_tokens : int
        Longest judgment, in tokens.
    """

    endpoint: EndpointConfig
    model: str = "gpt-4"
    attempts: int = 3
    max_tokens: int = 2048

    def __post_init__(self) -> None:
        for name in ("attempts", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", got=getattr(self, name))
        if not self.model.strip():
            raise ConfigError("No judge model named", fix="Set judge_model, for example to gpt-4")


@dataclass(frozen=True)
class Question:
    """One judgment to obtain: a prompt about an item, and which repeat of it."""

    item_id: str
    prompt: Prompt
    repeat: int


@dataclass(frozen=True)
class Judgment:
    """A judge's reply as it was read.

    Attributes
    ----------
    value : float or None
        What was read; None if nothing could be.
    reason : str or None
        Why there is no value.
    text : str
        The last reply, or what went wrong.
    judge : str
        The model that answered, and the name of the prompt.
    sent : mapping or None
        The settings of the request; None if there was no reply.
    """

    value: float | None
    reason: str | None
    text: str
    judge: str
    sent: Mapping[str, Any] | None = None

    def columns(self) -> dict[str, Any]:
        """Return the columns of the records that tell of it."""
        return {"score": self.value, "reason": self.reason, "judgment": self.text, "judge": self.judge}


class Asker:
    """Asks one judge model. A reply to the same question as an earlier one is read from the cache.

    Parameters
    ----------
    config : AskingConfig
    cache : ReplyCache, optional
        Stores every reply before anything else happens, readable or not. So an interrupted run loses at
        most the calls under way, and the replies that a judgment has had count as its attempts in a later run too.
        Failures, which cost nothing, are not stored, and a later run asks again.
    """

    def __init__(self, config: AskingConfig, *, cache: ReplyCache | None = None) -> None:
        self.config = config
        self._cache = ReplyCache(None) if cache is None else cache

    def key(self, question: Question, attempt: int = 0) -> str:
        """Return the key of a reply: everything that decides it."""
        return content_key(
            base_url=self.config.endpoint.shown_url,
            model=self.config.model,
            messages=question.prompt.messages,
            max_tokens=self.config.max_tokens,
            item_id=question.item_id,
            repeat=question.repeat,
            **({"attempt": attempt} if attempt else {}),
        )

    def ask_all(
        self,
        questions: Sequence[Question],
        read: Read,
        *,
        spending: Spending | None = None,
        label: str = "judge",
    ) -> list[Judgment]:
        """Return the judgment of every question, in order; equal questions are asked once.

        Parameters
        ----------
        questions : sequence of Question
        read : Read
            Reads a reply.
        spending : Spending, optional
            Counts tokens, and holds the budget.
        label : str
            Name of the progress bar.

        Raises
        ------
        JudgeError
            Every further call would be useless (`Transport.complete`). Replies until then are in the cache.
        """
        from tqdm import tqdm

        keys = [self.key(question) for question in questions]
        found = {key: self._kept(question, read) for key, question in zip(keys, questions, strict=True)}
        missing = {key: q for key, q in zip(keys, questions, strict=True) if found[key] is None}
        if missing:
            with (
                Transport(self.config.endpoint, spending) as transport,
                tqdm(total=len(missing), desc=label, unit="grade", disable=None, leave=False) as bar,
            ):

                async def ask(question: Question) -> Judgment:
                    judgment = await self._ask(transport, question, read)
                    bar.update()
                    return judgment

                found.update(zip(missing, transport.for_all(ask, missing.values()), strict=True))
        return [judgment for key in keys if (judgment := found[key]) is not None]

    def missing(self, questions: Sequence[Question], read: Read) -> list[Question]:
        """Return the questions that the cache does not answer, each once."""
        unique = {self.key(question): question for question in questions}
        return [question for question in unique.values() if self._kept(question, read) is None]

    def past_usage(self) -> list[Mapping[str, Any]]:
        """Return the kept replies that this judge model was asked for and whose tokens were counted."""
        rows = self._cache.values()
        return [row for row in rows if row.get("asked") == self.config.model and row.get("usage")]

    def _kept(self, question: Question, read: Read) -> Judgment | None:
        """Return the judgment, if kept replies decide it: one can be read, or there were as many as are allowed."""
        judgment = None
        for attempt in range(self.config.attempts):
            row = self._cache.get(self.key(question, attempt))
            if row is None:
                return None
            judgment = _read(row, read, question.prompt)
            if _is_final(judgment):
                break
        return judgment

    async def _ask(self, transport: Transport, question: Question, read: Read) -> Judgment:
        """Return the judgment, after at most `attempts` replies, kept ones included."""
        room = self.config.max_tokens
        judgment: Judgment | None = None
        for attempt in range(self.config.attempts):
            key = self.key(question, attempt)
            row = self._cache.get(key)
            if row is None:
                reply = await transport.complete(question.prompt.messages, model=self.config.model, max_tokens=room)
                if isinstance(reply, NoReply):
                    if judgment is not None and reply.reason == "http_400":
                        return judgment  # only the larger room was refused: the reply that was cut off stands
                    return Judgment(None, reply.reason, reply.detail, f"{self.config.model} {question.prompt.name}")
                row = _row(reply, question.prompt, self.config.model)
                self._cache.put(key, row)
            judgment = _read(row, read, question.prompt)
            if _is_final(judgment):
                break
            if judgment.reason == CUT:
                room *= 2
        assert judgment is not None  # attempts >= 1
        return judgment


def unscored_by_reason(judgments: Sequence[Judgment]) -> Counter[str]:
    """Return how many judgments have no value, by reason."""
    return Counter(judgment.reason for judgment in judgments if judgment.reason is not None)


def _row(reply: Reply, prompt: Prompt, asked: str) -> dict[str, Any]:
    """Return a reply as it is kept."""
    return {
        "judgment": reply.text,
        "judge": f"{reply.model} {prompt.name}",
        "asked": asked,
        "finish_reason": reply.finish_reason,
        "problem": reply.problem,
        "usage": asdict(reply.usage) if reply.usage else None,
        "prompt_bytes": prompt_bytes(prompt.messages),
        "sent": reply.sent,
    }


def _read(row: Mapping[str, Any], read: Read, prompt: Prompt) -> Judgment:
    """Return the judgment in a kept reply. It is read again each time; earlier releases kept no more than the text."""
    value, reason = read(row["judgment"], prompt.shown)
    if row.get("problem"):
        value, reason = None, row["problem"]
    elif reason == NO_RATING and row.get("finish_reason") == "length":
        reason = CUT
    return Judgment(value, reason, row["judgment"], row["judge"], row.get("sent"))


def _is_final(judgment: Judgment) -> bool:
    """Return whether another reply could not help: there is a value, or a filter stands before the model."""
    return judgment.value is not None or judgment.reason == FILTERED
