"""Single values that are not tables: a scoring request, an instruction, a metric's result, an answer's judgments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ItemKey = tuple[str, str]
"""Task and item id."""


@dataclass(frozen=True, slots=True)
class Request:
    """One continuation to score after one context; tasks make requests, and scoring answers them.

    `permutation`, `option` and `content` are as in `OptionScores`; `continuation` carries its leading delimiter
    (" A"), `n_chars` and `n_bytes` count the option's text without it.
    """

    task: str
    item_id: str
    permutation: int
    option: int
    content: int
    context: str
    continuation: str
    n_chars: int
    n_bytes: int


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction: the user's message of each turn (one or two), and reference answers if there are any."""

    item_id: str
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] = ()


@dataclass(frozen=True)
class MetricResult:
    """One metric value with its interval and sample size."""

    name: str  # MLflow metric key, "<section>/<metric>"
    value: float  # The point estimate; never NaN (a metric that cannot be computed is not returned)
    low: float | None = None  # Bounds of the interval at `level`, None where none applies
    high: float | None = None
    level: float = 0.95  # Confidence level of the interval
    n: int = 0  # Items or tokens the value was computed from
    n_unscored: int = 0  # Items left out because they have no prediction; never counted as wrong
    task: str | None = None  # The task and category it was computed on; None means pooled
    category: str | None = None
    # Of a noise floor: the paired test's p-value of "the variant is no farther than this"; None where there is no test
    p: float | None = None


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
