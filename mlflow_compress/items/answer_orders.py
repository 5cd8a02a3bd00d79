"""Answer orders of lettered questions: the original one, shuffles, or all permutations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from math import factorial

from mlflow_compress.errors import UnsupportedError
from mlflow_compress.items.task import Row, TaskSettings, seeded

MOST_OPTIONS = 4  # most options of a question that is scored in all orders (24 for four options)


def identity(row: Row) -> list[int]:
    """Return the original order: 0, 1, 2, ..."""
    return list(range(len(row["choices"])))


def drawn_order(row: Row, settings: TaskSettings, number: int) -> list[int]:
    """Return shuffle `number` of a row's answers, drawn uniformly from all permutations."""
    order = identity(row)
    return seeded(settings, row["id"], number).sample(order, len(order))


def shuffled_orders(row: Row, settings: TaskSettings) -> list[list[int]]:
    """Return the original order and `settings.num_shuffles` shuffles."""
    return [identity(row)] + [drawn_order(row, settings, number) for number in range(1, settings.num_shuffles + 1)]


def every_order(row: Row) -> list[list[int]]:
    """Return all k! orders in lexicographic order. The first one is the original order."""
    return [list(order) for order in permutations(identity(row))]


def reordered(row: Row, settings: TaskSettings, number: int) -> Row:
    """Return a few-shot example with its answers in shuffle `number`."""
    order = drawn_order(row, settings, number)
    return {**row, "choices": [row["choices"][content] for content in order], "answer": order.index(row["answer"])}


def sampled(name: str, rows: Sequence[Row], settings: TaskSettings) -> list[Row]:
    """Return the rows to score in every order: a seeded sample of those with at most four options, in file order.

    Raises
    ------
    UnsupportedError
        Every row has more options, and thus 120 or more orders.
    """
    few = [row for row in rows if len(row["choices"]) <= MOST_OPTIONS]
    if rows and not few:
        first = rows[0]
        raise UnsupportedError(
            f"All orders of {len(first['choices'])} options are too many ({factorial(len(first['choices']))})",
            allowed=f"at most {MOST_OPTIONS} options ({factorial(MOST_OPTIONS)} orders)",
            got=f"{name}/{first['id']}",
            fix="Give all_orders=0, or tasks of at most four options",
        )
    chosen = seeded(settings, name, "all orders").sample(range(len(few)), min(settings.all_orders, len(few)))
    return [few[index] for index in sorted(chosen)]
