"""Single-answer grading with MT-Bench's prompts: which questions a judge is asked, and the records of its ratings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.judges.asking import Judgment, Question
from mlflow_compress.judges.prompts import grading_prompt, needs_reference
from mlflow_compress.records import Generations, Instruction, Judgments


@dataclass(frozen=True)
class Asked:
    """A question to the judge, and the answer that it is about."""

    item: Instruction
    turn: int
    question: Question


def gradings(instructions: Sequence[Instruction], answers: Generations, *, repeats: int = 1) -> list[Asked]:
    """Return the gradings of sample 0 of every turn of every instruction.

    Each answer is graded `repeats` times, because judges are not deterministic even at temperature 0. Math, reasoning
    and coding need reference answers.
    """
    texts = answers.first_samples()
    return [
        Asked(item, turn, Question(item.item_id, prompt, repeat))
        for item in instructions
        for said in [answers_to(item, texts)]
        for turn in range(len(item.turns))
        for prompt in [grading_prompt(item.category, turn, item.turns, said, references(item))]
        for repeat in range(repeats)
    ]


def answers_to(item: Instruction, texts: dict[tuple[str, int], str]) -> list[str]:
    """Return the answer of each turn; a missing one is an `AlignmentError`."""
    turns = range(len(item.turns))
    if missing := [turn for turn in turns if (item.item_id, turn) not in texts]:
        raise AlignmentError("An instruction lacks an answer", got=f"{item.item_id}, turn {missing[0]}")
    return [texts[item.item_id, turn] for turn in turns]


def references(item: Instruction) -> Sequence[str]:
    """Return the reference answer of each turn, where the category needs them; missing ones are a `DataError`."""
    there = [text for text in item.reference if text.strip()]
    if needs_reference(item.category) and len(there) < len(item.turns):
        raise DataError(
            f"Instruction {item.item_id} has no reference answers, and MT-Bench needs them for {item.category}",
            fix="Add 'reference' (a text per turn) to the instruction file",
        )
    return item.reference


def records(questions: Sequence[Asked], judgments: Sequence[Judgment], *, task: str) -> Judgments:
    """Return the records of the judgments, one row per question."""
    rows: list[dict[str, Any]] = [
        {
            "task": task,
            "item_id": one.item.item_id,
            "turn": one.turn,
            "repeat": one.question.repeat,
            "category": one.item.category,
            **judgment.columns(),
        }
        for one, judgment in zip(questions, judgments, strict=True)
    ]
    return Judgments.from_rows(rows)
