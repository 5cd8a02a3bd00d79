"""Lettered multiple choice: the option's letter is the answer, few-shot, in the original MMLU's prompt style."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from math import factorial

from mlflow_compress.errors import DataError, UnsupportedError
from mlflow_compress.records import Items, Request
from mlflow_compress.tasks.base import FAMILIES, Family, Row, Task, TaskSettings, item_row, limited, request, seeded

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
UNCERTAIN_OPTIONS = ("I don't know", "None of the above")  # E and F of the uncertainty benchmark
MOST_OPTIONS = 4  # whose orders, 24, are all scored


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


@dataclass(frozen=True, kw_only=True)
class _Twin:
    """One way to show the items of a file: as they are, with options E and F, or in every order.

    Attributes
    ----------
    name, family : str
        The task's name and its family (see `Items`).
    orders : callable (row) -> list of orders
        The answer orders that are shown; the first is the original one.
    added : tuple of str
        Options behind the row's own.
    """

    name: str
    family: str
    orders: Callable[[Row], list[list[int]]]
    added: tuple[str, ...] = ()


def _draw(row: Row, settings: TaskSettings, number: int) -> list[int]:
    """Return shuffle `number` of a row's answers, drawn from all orders (fixed points allowed)."""
    identity = list(range(len(row["choices"])))
    return seeded(settings, row["id"], number).sample(identity, len(identity))


def _shuffled_orders(row: Row, settings: TaskSettings) -> list[list[int]]:
    """Return the original order and `settings.shuffles` drawn ones."""
    return [list(range(len(row["choices"])))] + [
        _draw(row, settings, number) for number in range(1, settings.shuffles + 1)
    ]


def _every_order(row: Row) -> list[list[int]]:
    """Return all k! orders in lexicographic order, so that the first is the original one."""
    return [list(order) for order in permutations(range(len(row["choices"])))]


def _reordered(row: Row, settings: TaskSettings, number: int) -> Row:
    """Return a few-shot example with its answers in shuffle `number`."""
    order = _draw(row, settings, number)
    return {**row, "choices": [row["choices"][content] for content in order], "answer": order.index(row["answer"])}


def _headers(
    examples: Mapping[str, Sequence[Row]], settings: TaskSettings, added: Sequence[str]
) -> Callable[[str, int], str]:
    """Return the few-shot header by category and permutation.

    [ORDER] does not say whether the examples are shuffled: here they stay as they are unless
    `settings.shuffle_examples` is set, and the original order (permutation 0) always has them as they are. All items
    of a category share a permutation's header, so that scoring computes it once.
    """

    @cache
    def header(category: str, permutation: int) -> str:
        shown = examples.get(category, [])[: settings.shots]
        if settings.shuffle_examples and permutation:
            shown = [_reordered(row, settings, permutation) for row in shown]
        return few_shot_header(category, shown, added)

    return header


def _task(twin: _Twin, rows: Sequence[Row], header: Callable[[str, int], str]) -> Task:
    """Build one task: the items, and a request an order and letter."""
    requests: list[Request] = []
    items = []
    for row in rows:
        for permutation, order in enumerate(twin.orders(row)):
            shown = [row["choices"][content] for content in order] + list(twin.added)
            contents = order + list(range(len(order), len(shown)))
            context = header(row["category"], permutation) + render(row["question"], shown)
            requests += [
                request(
                    twin.name, row, context, LETTERS[option], option=option, content=content, permutation=permutation
                )
                for option, content in enumerate(contents)
            ]
            if permutation == 0:
                columns = {"question": row["question"], "prompt": context, "options": shown, "gold": row["answer"]}
                items.append(item_row(twin.name, twin.family, "loglik", row, **columns))
    return Task(name=twin.name, family=twin.family, items=Items.from_rows(items), requests=tuple(requests))


def _sampled(name: str, rows: Sequence[Row], settings: TaskSettings) -> list[Row]:
    """Return the rows that are shown in every order: a seeded sample, in file order.

    Raises
    ------
    UnsupportedError
        When a row has more than four options: their orders would be 120 and more.
    """
    for row in rows:
        if len(row["choices"]) > MOST_OPTIONS:
            raise UnsupportedError(
                f"All orders of {len(row['choices'])} options are too many ({factorial(len(row['choices']))})",
                allowed=f"at most {MOST_OPTIONS} options ({factorial(MOST_OPTIONS)} orders)",
                got=f"{name}/{row['id']}",
                fix="Give all_orders=0, or tasks of at most four options",
            )
    chosen = seeded(settings, name, "all orders").sample(range(len(rows)), min(settings.all_orders, len(rows)))
    return [rows[index] for index in sorted(chosen)]


def _build(name: str, rows: Sequence[Row], settings: TaskSettings) -> list[Task]:
    """Return the task, its six-option twin, and where asked for the twin of all orders.

    Rows marked "dev" are the few-shot examples of their category.
    """
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
    plain = _Twin(name=name, family="lettered", orders=lambda row: _shuffled_orders(row, settings))
    six = _Twin(
        name=f"{name}_six",
        family="lettered_six",
        orders=lambda row: [list(range(len(row["choices"])))],
        added=UNCERTAIN_OPTIONS,
    )
    tasks = [_task(twin, tests, _headers(examples, settings, twin.added)) for twin in (plain, six)]
    if settings.all_orders:
        every = _Twin(name=f"{name}_orders", family="lettered_orders", orders=_every_order)
        tasks.append(_task(every, _sampled(name, tests, settings), _headers(examples, settings, ())))
    return tasks


FAMILIES.register("lettered")(
    Family(fields={"question": str, "choices": list, "answer": int}, check=_check, build=_build)
)
