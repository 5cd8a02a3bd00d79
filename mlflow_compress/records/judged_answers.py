"""Answers with everything that judges said of them, put together from several records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class AnswerFeedback:
    """One judgment of an answer."""

    name: str  # The judge: "mt_bench", "pairwise", ..
    value: float | None  # The rating; None if there is none
    reason: str | None  # Why there is no rating, in one word
    rationale: str  # What the judge wrote
    source: str  # The model that judged, and its prompt
    details: Mapping[str, str] = field(default_factory=dict)  # More about it, such as its repeat


@dataclass(frozen=True, kw_only=True)
class JudgedAnswer:
    """One answer that was judged."""

    model: str  # Whose answer it is: "baseline" or "variant"
    messages: Sequence[Mapping[str, str]]  # The conversation before it: "role" and "content"
    answer: str  # The answer
    tags: Mapping[str, str]  # By which traces are filtered: item, turn, category
    feedback: Sequence[AnswerFeedback]  # Every judgment of it
