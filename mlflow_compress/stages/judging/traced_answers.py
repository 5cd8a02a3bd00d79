"""The judged answers of a run, each with every judgment of it, for a page that shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlflow_compress.items.sources.instructions import Instruction
from mlflow_compress.records import Generations, Judgments
from mlflow_compress.records.judged_answers import AnswerFeedback, JudgedAnswer


def judged_answers(
    instructions: Sequence[Instruction],
    answers: Mapping[str, Generations],
    judgments: Mapping[str, Judgments | None],
) -> list[JudgedAnswer]:
    """Return every answer that was judged, in the order of the instructions.

    Parameters
    ----------
    instructions : sequence of Instruction
        What was asked.
    answers : mapping of str to Generations
        One answer per turn of "baseline" and "variant".
    judgments : mapping of str to Judgments or None
        What judges say of them, by the same names. A comparison of two answers stands with the variant's.
    """
    found = []
    for who, generations in answers.items():
        feedback = _by_answer(judgments[who])
        first = generations.where(sample=0)
        columns = (first.table.column(name).to_pylist() for name in ("item_id", "turn", "text"))
        texts = {(item, turn): text for item, turn, text in zip(*columns, strict=True)}
        for item in instructions:
            messages: list[dict[str, str]] = []
            for turn, asked in enumerate(item.turns):
                messages.append({"role": "user", "content": asked})
                answer = texts[item.item_id, turn]
                if given := feedback.get((item.item_id, turn)):
                    tags = {"item_id": item.item_id, "turn": str(turn + 1), "category": item.category}
                    found.append(
                        JudgedAnswer(model=who, messages=tuple(messages), answer=answer, tags=tags, feedback=given)
                    )
                messages.append({"role": "assistant", "content": answer})
    return found


def _by_answer(judgments: Judgments | None) -> dict[tuple[str, int], list[AnswerFeedback]]:
    found: dict[tuple[str, int], list[AnswerFeedback]] = {}
    for row in judgments.table.to_pylist() if judgments is not None else ():
        one = AnswerFeedback(
            name=row["task"],
            value=row["score"],
            reason=row["reason"],
            rationale=row["judgment"],
            source=row["judge"],
            details={"repeat": str(row["repeat"])},
        )
        found.setdefault((row["item_id"], row["turn"]), []).append(one)
    return found
