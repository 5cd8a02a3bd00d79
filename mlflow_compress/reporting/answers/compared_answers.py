"""What both models answered to each turn of each instruction, largest drop first, as rows of a JSONL file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mlflow_compress.errors import DataError
from mlflow_compress.files.json_text import parse_json
from mlflow_compress.metrics.judge_scores import by_judge_model
from mlflow_compress.records import Generations, Judgments
from mlflow_compress.reporting.answers.first_difference import first_difference

AnswerKey = tuple[str, int]
"""Instruction and turn."""


@dataclass(frozen=True, kw_only=True)
class ComparedAnswer:
    """One turn of one instruction, and what both models answered.

    Attributes
    ----------
    item_id, category : str
        The instruction.
    turn : int
        0 or 1.
    question : str
        The user's message of this turn.
    baseline, variant : str
        The answers.
    grades_baseline, grades_variant : mapping of str to float
        Mean grade by judge model; one without a readable grade is not there. The name of a single judge is "".
    similarity : float or None
        ConSCompF similarity of the models' sampled answers to the instruction's first turn; None where there is none.
    """

    item_id: str
    turn: int
    category: str
    question: str
    baseline: str
    variant: str
    grades_baseline: Mapping[str, float] = field(default_factory=dict)
    grades_variant: Mapping[str, float] = field(default_factory=dict)
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
    """Return all pairs of answers: largest drop of the grade first, then lowest similarity, the same answers last.

    Parameters
    ----------
    questions : mapping of str to sequence of str
        The user's messages of each instruction, by turn.
    categories : mapping of str to str
        Category of each instruction.
    answers, grades : pair
        The baseline's, and the variant's.
    similarity : mapping of str to float, optional
        By instruction.
    """
    baseline, variant = (first_texts(generations) for generations in answers)
    graded = [mean_grades(judgments) for judgments in grades]
    found = [
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
    return sorted(found, key=_order)


def _order(pair: ComparedAnswer) -> tuple[Any, ...]:
    """Return what pairs are sorted by; what is not known comes after what is."""
    drop = math.inf if pair.drop is None else -pair.drop
    return drop, pair.baseline == pair.variant, math.inf if pair.similarity is None else pair.similarity


def first_texts(generations: Generations, column: str = "text") -> dict[AnswerKey, str]:
    """Return the text, or another column, of each instruction's and turn's first sample."""
    first = generations.where(sample=0)
    names = ("item_id", "turn", column)
    rows = zip(*(first.table.column(name).to_pylist() for name in names), strict=True)
    return {(item, turn): text for item, turn, text in rows}


def mean_grades(judgments: Judgments | None) -> dict[AnswerKey, dict[str, float]]:
    """Return each judge model's mean grade of each answer, over its readable ones; the only judge's name is ""."""
    found: dict[AnswerKey, dict[str, list[float]]] = {}
    for judge, own in ({} if judgments is None else by_judge_model(judgments)).items():
        for row in own.table.to_pylist():
            if row["score"] is not None:
                found.setdefault((row["item_id"], row["turn"]), {}).setdefault(judge, []).append(row["score"])
    return {key: {judge: sum(s) / len(s) for judge, s in by.items()} for key, by in found.items()}


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
