"""Both models' answers side by side: what became of the judgments."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mlflow_compress.errors import DataError
from mlflow_compress.files import parse_json
from mlflow_compress.metrics.greedy_answers import first_difference
from mlflow_compress.metrics.judge_scores import by_judge_model
from mlflow_compress.records import Generations, Judgments
from mlflow_compress.reporting.tables import TEMPLATES

_WORD = re.compile(r"\s*\S{1,40}|\s+")
_LONGEST_WORD = 20  # characters by which the mark may begin before the difference
_SHARED_SHOWN, _REST_SHOWN = 300, 1200  # characters of a text that are not folded


@dataclass(frozen=True)
class MarkedText:
    """A text in five parts, which together are the text."""

    folded_start: str  # What both texts begin with; a long beginning is folded but for its end
    shared: str
    mark: str  # The first word that differs; empty where the text ends there, or where both are the same
    rest: str  # What follows; the end of a long text is folded
    folded_rest: str
    ends: bool = False  # Whether this text ends where the other one goes on


def marked(one: str, other: str) -> tuple[MarkedText, MarkedText]:
    """Return both texts with the first word that differs marked."""
    at = first_difference(one, other)
    if at is None:
        same = MarkedText("", one[:_REST_SHOWN], "", "", one[_REST_SHOWN:])
        return same, same
    start = at
    if not (one[at:] + other[at:])[0].isspace() or (one[at:] and other[at:]):  # not where one text ends with the word
        while start > 0 and at - start < _LONGEST_WORD and not one[start - 1].isspace():
            start -= 1
    return _parts(one, start), _parts(other, start)


def _parts(text: str, start: int) -> MarkedText:
    word = _WORD.match(text, start)
    end = word.end() if word else start
    fold = start - _SHARED_SHOWN if start > 2 * _SHARED_SHOWN else 0
    more = end + _REST_SHOWN if len(text) > end + 2 * _REST_SHOWN else len(text)
    parts = text[:fold], text[fold:start], text[start:end], text[end:more], text[more:]
    return MarkedText(*parts, ends=start == len(text))


AnswerKey = tuple[str, int]
"""Instruction and turn."""


@dataclass(frozen=True, kw_only=True)
class ComparedAnswer:
    """One turn of one instruction, and what both models answered."""

    item_id: str  # The instruction
    turn: int  # 0 or 1
    category: str
    question: str  # The user's message of this turn
    baseline: str  # The answers
    variant: str
    # Mean grade by judge model; one without a readable grade is not there. The name of a single judge is "".
    grades_baseline: Mapping[str, float] = field(default_factory=dict)
    grades_variant: Mapping[str, float] = field(default_factory=dict)
    # ConSCompF similarity of the models' sampled answers to the instruction's first turn; None where there is none
    similarity: float | None = None

    @property
    def drop(self) -> float | None:
        """By how much the variant's grade is lower, mean over the judges that graded both; None without any."""
        both = self.grades_baseline.keys() & self.grades_variant.keys()
        drops = [self.grades_baseline[judge] - self.grades_variant[judge] for judge in sorted(both)]
        return sum(drops) / len(drops) if drops else None


def compared_answers(
    questions: Mapping[str, Sequence[str]],
    categories: Mapping[str, str],
    answers: tuple[Generations, Generations],
    grades: tuple[Judgments | None, Judgments | None] = (None, None),
    similarity: Mapping[str, float] | None = None,
) -> list[ComparedAnswer]:
    """Return all pairs of answers: largest drop of the grade first, then lowest similarity, the same answers last."""
    baseline, variant = (generations.first_samples() for generations in answers)
    graded = [mean_grades(judgments) for judgments in grades]
    pairs = [
        ComparedAnswer(
            item_id=item,
            turn=turn,
            category=categories[item],
            question=question,
            baseline=baseline[item, turn],
            variant=variant[item, turn],
            grades_baseline=graded[0].get((item, turn), {}),
            grades_variant=graded[1].get((item, turn), {}),
            similarity=(similarity or {}).get(item) if turn == 0 else None,
        )
        for item, turns in questions.items()
        for turn, question in enumerate(turns)
    ]
    return sorted(pairs, key=_order)


def _order(pair: ComparedAnswer) -> tuple[Any, ...]:
    """Return what pairs are sorted by; what is not known comes after what is."""
    drop = math.inf if pair.drop is None else -pair.drop
    return drop, pair.baseline == pair.variant, math.inf if pair.similarity is None else pair.similarity


def mean_grades(judgments: Judgments | None) -> dict[AnswerKey, dict[str, float]]:
    """Return each judge model's mean grade of each answer, over its readable ones; the only judge's name is ""."""
    grades: dict[AnswerKey, dict[str, list[float]]] = {}
    for judge, of_judge in ({} if judgments is None else by_judge_model(judgments)).items():
        for row in of_judge.table.to_pylist():
            if row["score"] is not None:
                grades.setdefault((row["item_id"], row["turn"]), {}).setdefault(judge, []).append(row["score"])
    return {key: {judge: sum(s) / len(s) for judge, s in by.items()} for key, by in grades.items()}


def as_jsonl(pairs: Sequence[ComparedAnswer]) -> str:
    """Return one JSON object per pair and line: its fields, and where the answers part (`first_difference`)."""
    rows = ({**asdict(pair), "first_difference": first_difference(pair.baseline, pair.variant)} for pair in pairs)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def from_jsonl(text: str, source: str) -> list[ComparedAnswer]:
    """Return the pairs that `as_jsonl` wrote. Anything else is a `DataError` that names `source`."""
    pairs = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line:
            continue
        try:
            row = parse_json(line, source=source)
            del row["first_difference"]
            pairs.append(ComparedAnswer(**row))
        except (DataError, TypeError, KeyError) as error:
            raise DataError(f"Line {number} of the compared answers cannot be read", got=source) from error
    return pairs


REPORT_SHOWS = 10
"""Number of pairs in a report; the page of the judge's run has all of them."""


def answer_cards(pairs: Sequence[ComparedAnswer]) -> list[dict[str, Any]]:
    """Return what the template shows of each pair, in the given order."""
    return [
        {
            "where": f"{pair.item_id} · {pair.category} · turn {pair.turn + 1}",
            "change": _change(pair),
            "question": pair.question,
            "texts": marked(pair.baseline, pair.variant),
            "grades": (_grades(pair.grades_baseline), _grades(pair.grades_variant)),
        }
        for pair in pairs
    ]


def _change(pair: ComparedAnswer) -> str:
    """Return what is known of the difference, in a few words."""
    parts = []
    if pair.drop is not None:
        parts.append("same grade" if pair.drop == 0 else f"grade {-pair.drop:+.2g}")
    if pair.similarity is not None:
        parts.append(f"similarity of sampled answers {pair.similarity:.3f}")
    if pair.baseline == pair.variant:
        parts.append("the same answer")
    return ", ".join(parts)


def _grades(grades: Mapping[str, float]) -> str:
    each = [f"{grade:.3g} ({judge})" if judge else f"{grade:.3g} of 10" for judge, grade in sorted(grades.items())]
    return f"grade {', '.join(each)}" if each else ""


def render_answers(title: str, pairs: Sequence[ComparedAnswer]) -> str:
    """Return one HTML page with every pair, in the given order; it loads nothing, and every text is escaped."""
    return TEMPLATES.get_template("answers.html.j2").render(title=title, cards=answer_cards(pairs))


_UNSCORED = "judge/unscored/"


def account_rows(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return name and text of each line of a judge run's account; none without judgments."""
    if "judge/judgments" not in values and "judge/calls" not in values:
        return []
    rows = []
    if "judge/judgments" in values:
        n, unscored = values["judge/judgments"], values.get("judge/unscored", 0)
        reasons = [(name.removeprefix(_UNSCORED), k) for name, k in values.items() if name.startswith(_UNSCORED)]
        listed = ", ".join(f"{k:,.0f} {reason}" for reason, k in sorted(reasons, key=lambda pair: -pair[1]))
        lacking = f"{unscored:,.0f} of them without a rating: {listed}" if unscored else "all with a rating"
        rows.append(("Judgments", f"{n:,.0f}, {lacking}"))
    without = values.get("judge/calls_without_usage", 0)
    counted = f", {without:,.0f} of them without a count of tokens" if without else ""
    lost = values.get("judge/calls_unanswered", 0)
    counted += f", and {lost:,.0f} more that were sent and never answered" if lost else ""
    rows.append(("New calls", f"{values.get('judge/calls', 0):,.0f}{counted}"))
    if "judge/prompt_tokens" in values:
        rows.append(("Tokens of prompts", f"{values['judge/prompt_tokens']:,.0f}"))
        reasoning = values.get("judge/reasoning_tokens")
        thought = "" if reasoning is None else f", of which {reasoning:,.0f} were reasoning"
        rows.append(("Tokens of replies", f"{values['judge/completion_tokens']:,.0f}{thought}"))
    if "judge/cost" in values:
        rows.append(("Cost", f"{values['judge/cost']:.4g}, in the currency of the prices"))
    return rows


def account_text(values: Mapping[str, float]) -> str:
    """Return the account as a sentence; empty without judgments."""
    return "; ".join(f"{name.lower()} {text}" for name, text in account_rows(values))
