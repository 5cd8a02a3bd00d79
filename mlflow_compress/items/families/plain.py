"""Families whose prompt is a field of the row as it stands.

- `cloze`: scores each option's text after the context, with log-likelihoods per character (acc_norm).
- `last_word`: correct if greedy decoding gives every token of the target.
- `exact`: short generation, correct if the first line equals one of the answers.
- `ungraded`: items that are scored, but have no single correct option. Only the harness's own metrics grade them; they
  come from tasks of lm-evaluation-harness, not from question files.
- `logged`: answers that an application has logged, which are neither right nor wrong (`openai:FILE`).
"""

from collections.abc import Sequence
from typing import Any

from mlflow_compress.errors import DataError
from mlflow_compress.item_families import ITEM_FAMILIES, ItemFamily
from mlflow_compress.items import task
from mlflow_compress.records import Items


def _item(name: str, family: str, rule: str, row: task.Row, prompt: str, **columns: Any) -> dict[str, Any]:
    return task.item_row(name, family, rule, row, question=row[prompt], prompt=row[prompt], **columns)


def _check_cloze(row: task.Row) -> None:
    choices = row["choices"]
    if len(choices) < 2 or any(not isinstance(choice, str) or not choice.strip() for choice in choices):
        raise DataError("'choices' must be two or more texts that are not empty", got=choices)
    task.check_answer(row)


def _build_cloze(name: str, rows: Sequence[task.Row], settings: task.TaskSettings) -> list[task.Task]:
    sample = task.limited(name, rows, settings)
    rule = "loglik_per_char"
    items = [_item(name, "cloze", rule, r, "context", options=r["choices"], gold=r["answer"]) for r in sample]
    requests = [
        task.request(name, row, row["context"], choice, index)
        for row in sample
        for index, choice in enumerate(row["choices"])
    ]
    return [task.Task(name=name, family="cloze", items=Items.from_rows(items), requests=tuple(requests))]


def _build_last_word(name: str, rows: Sequence[task.Row], settings: task.TaskSettings) -> list[task.Task]:
    sample = task.limited(name, rows, settings)
    items = [_item(name, "last_word", "greedy", row, "context", options=[row["target"]], gold=0) for row in sample]
    requests = tuple(task.request(name, row, row["context"], row["target"]) for row in sample)
    return [task.Task(name=name, family="last_word", items=Items.from_rows(items), requests=requests)]


def _check_exact(row: task.Row) -> None:
    if not row["answers"] or any(not isinstance(answer, str) or not answer.strip() for answer in row["answers"]):
        raise DataError("'answers' must be one or more texts that are not empty", got=row["answers"])


def _build_exact(name: str, rows: Sequence[task.Row], settings: task.TaskSettings) -> list[task.Task]:
    """Return one task without requests: its answers are generated."""
    sample = task.limited(name, rows, settings)
    items = [_item(name, "exact", "exact_match", row, "prompt", answers=row["answers"]) for row in sample]
    return [task.Task(name=name, family="exact", items=Items.from_rows(items), answering=task.Answering())]


task.register_family(
    "cloze",
    task.Family(
        fields={"context": str, "choices": list, "answer": int},
        check=_check_cloze,
        build=_build_cloze,
        items={"cloze": ItemFamily(chooses=True, graded=True, headline=True)},
    ),
)
task.register_family(
    "exact",
    task.Family(
        fields={"prompt": str, "answers": list},
        check=_check_exact,
        build=_build_exact,
        items={"exact": ItemFamily(graded=True)},
    ),
)
task.register_family(
    "last_word",
    task.Family(
        fields={"context": str, "target": str},
        build=_build_last_word,
        items={"last_word": ItemFamily(graded=True)},
    ),
)
ITEM_FAMILIES.register("ungraded")(ItemFamily())
ITEM_FAMILIES.register("logged")(ItemFamily(logged=True, by_category=True))


ITEM_FAMILIES.register("long_needle")(ItemFamily(chooses=True, graded=True, headline=True, by_category=True))
ITEM_FAMILIES.register("long_copy")(ItemFamily(graded=True, by_category=True))
ITEM_FAMILIES.register("long_text")(ItemFamily(by_category=True))
