"""Answers with everything that judges said of them, put together from several records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class AnswerFeedback:
    """One judgment of an answer.

    Attributes
    ----------
    name : str
        The judge: "mt_bench", "pairwise", ...
    value : float or None
        The rating; None if there is none.
    reason : str or None
        Why there is no rating, in one word.
    rationale : str
        What the judge wrote.
    source : str
        The model that judged, and its prompt.
    details : mapping of str to str
        More about it, such as its repeat.
    """

    name: str
    value: float | None
    reason: str | None
    rationale: str
    source: str
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class JudgedAnswer:
    """One answer that was judged.

    Attributes
    ----------
    model : str
        Whose answer it is: "baseline" or "variant".
    messages : sequence of mapping
        The conversation before it: "role" and "content".
    answer : str
        The answer.
    tags : mapping of str to str
        By which traces are filtered: item, turn, category.
    feedback : sequence of AnswerFeedback
        Every judgment of it.
    """

    model: str
    messages: Sequence[Mapping[str, str]]
    answer: str
    tags: Mapping[str, str]
    feedback: Sequence[AnswerFeedback]
