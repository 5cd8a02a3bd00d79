"""Answers side by side as HTML without scripts: the part of a report, and a page of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlflow_compress.reporting.answers.compared_answers import ComparedAnswer
from mlflow_compress.reporting.answers.first_difference import MarkedText, marked
from mlflow_compress.reporting.templates import TEMPLATES

REPORT_SHOWS = 10
"""Number of pairs in a report; the page of the judge's run has all of them."""


@dataclass(frozen=True, kw_only=True)
class AnswerCard:
    """A pair of answers as it is shown."""

    where: str
    change: str
    question: str
    baseline: MarkedText
    variant: MarkedText
    grade_baseline: str
    grade_variant: str


def answer_cards(pairs: Sequence[ComparedAnswer]) -> list[AnswerCard]:
    """Return how each pair is shown, in the given order."""
    return [_card(pair) for pair in pairs]


def _card(pair: ComparedAnswer) -> AnswerCard:
    baseline, variant = marked(pair.baseline, pair.variant)
    return AnswerCard(
        where=f"{pair.item_id} · {pair.category} · turn {pair.turn + 1}",
        change=_change(pair),
        question=pair.question,
        baseline=baseline,
        variant=variant,
        grade_baseline=_grades(pair.grades_baseline),
        grade_variant=_grades(pair.grades_variant),
    )


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
    """Return the grades in words; empty without any."""
    each = [f"{grade:.3g} ({judge})" if judge else f"{grade:.3g} of 10" for judge, grade in sorted(grades.items())]
    return f"grade {', '.join(each)}" if each else ""


def render_answers(title: str, pairs: Sequence[ComparedAnswer]) -> str:
    """Return one HTML page with every pair, in the given order; it loads nothing, and every text is escaped."""
    return TEMPLATES.get_template("answers.html.j2").render(title=title, cards=answer_cards(pairs))
