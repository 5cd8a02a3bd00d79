"""Lettered multiple choice: the option's letter is the answer, few-shot, in the original MMLU's prompt style."""

from __future__ import annotations

from collections.abc import Sequence

from mlflow_compress.errors import DataError
from mlflow_compress.records import Items, Request
from mlflow_compress.tasks.base import FAMILIES, Family, Row, Task, TaskSettings, item_row, limited, request, seeded

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
UNCERTAIN_OPTIONS = ("I don't know", "None of the above")  # E and F of the uncertainty benchmark


def _check(row: Row) -> None:
    """Refuse a row whose choices or answer cannot be used."""
    choices = row["choices"]
    if not 2 <= len(choices) <= len(LETTERS) - len(UNCERTAIN_OPTIONS):
        raise DataError("'choices' has a wrong number of options", allowed="2 to 24", got=len(choices))
    if any(not isinstance(choice, str) or not choice.strip() for choice in choices):
        raise DataError("'choices' must be texts that are not empty", got=choices)
    if not 0 <= row["answer"] < len(choices):
        raise DataError("'answer' is not the index of a choice", allowed=f"0 to {len(choices) - 1}", got=row["answer"])
    if row.get("split", "test") not in ("dev", "test"):
        raise DataError("'split' is unknown", allowed=("dev", "test"), got=row["split"])


def render(question: str, options: Sequence[str]) -> str:
    """Return the question and its lettered options, up to and including "Answer:"."""
    lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False)]
    return "\n".join([question.strip(), *lines, "Answer:"])


def few_shot_header(category: str, examples: Sequence[Row], added: Sequence[str]) -> str:
    """Return the instruction line and the answered examples, each followed by a blank line."""
    blocks = [f"The following are multiple choice questions (with answers) about {category.replace('_', ' ')}."]
    blocks += [f"{render(row['question'], [*row['choices'], *added])} {LETTERS[row['answer']]}" for row in examples]
    return "\n\n".join(blocks) + "\n\n"


def _orders(row: Row, settings: TaskSettings, shuffles: int) -> list[list[int]]:
    """Return the original order and `shuffles` seeded ones, drawn from all orders (fixed points allowed)."""
    identity = list(range(len(row["choices"])))
    return [identity] + [
        seeded(settings, row["id"], number).sample(identity, len(identity)) for number in range(1, shuffles + 1)
    ]


def _task(
    name: str, rows: Sequence[Row], headers: dict[str, str], settings: TaskSettings, added: Sequence[str]
) -> Task:
    """Build the plain task, or with `added` options the six-option one (original order only)."""
    family = "lettered_six" if added else "lettered"
    requests: list[Request] = []
    items = []
    for row in rows:
        orders = _orders(row, settings, 0 if added else settings.shuffles)
        for permutation, order in enumerate(orders):
            shown = [row["choices"][content] for content in order] + list(added)
            contents = order + list(range(len(order), len(shown)))
            context = headers[row["category"]] + render(row["question"], shown)
            requests += [
                request(name, row, context, LETTERS[option], option=option, content=content, permutation=permutation)
                for option, content in enumerate(contents)
            ]
            if permutation == 0:
                columns = {"question": row["question"], "prompt": context, "options": shown, "gold": row["answer"]}
                items.append(item_row(name, family, "loglik", row, **columns))
    return Task(name=name, family=family, items=Items.from_rows(items), requests=tuple(requests))


def _build(name: str, rows: Sequence[Row], settings: TaskSettings) -> list[Task]:
    """Return the task and its six-option twin; rows marked "dev" are the few-shot examples of their category."""
    examples: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("split", "test") == "dev":
            examples.setdefault(row["category"], []).append(row)
    tests = limited(name, [row for row in rows if row.get("split", "test") == "test"], settings)
    for category in dict.fromkeys(row["category"] for row in tests):
        if len(examples.get(category, [])) < settings.shots:
            raise DataError(
                f"Category {category!r} of {name} has too few few-shot examples (rows with split 'dev')",
                allowed=f"{settings.shots} or more",
                got=len(examples.get(category, [])),
                fix="Add examples or lower 'shots'",
            )
    tasks = []
    for added in ((), UNCERTAIN_OPTIONS):
        headers = {
            category: few_shot_header(category, examples.get(category, [])[: settings.shots], added)
            for category in dict.fromkeys(row["category"] for row in tests)
        }
        tasks.append(_task(f"{name}_six" if added else name, tests, headers, settings, added))
    return tasks


FAMILIES.register("lettered")(
    Family(fields={"question": str, "choices": list, "answer": int}, check=_check, build=_build)
)
