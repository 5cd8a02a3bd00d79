"""Lettered multiple choice: the option's letter is the answer, few-shot, in one or several prompt styles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.item_families import ItemFamily
from mlflow_compress.items.answer_orders import every_order, identity, reordered, sampled, shuffled_orders
from mlflow_compress.items.prompt_style import DEFAULT, LETTERS, PASSAGES, PromptStyle, kind_of, styles_of
from mlflow_compress.items.task import Family, Row, Task, TaskSettings, item_row, limited, register_family, request
from mlflow_compress.records import Items, Request

UNCERTAIN_OPTIONS = ("I don't know", "None of the above")  # E and F of the uncertainty benchmark
OWN_OPTIONS = 4  # of a question that is also asked with E and F
SPLITS = ("dev", "test")


def _check(row: Row) -> None:
    """Refuse a row whose choices, answer or passage cannot be used."""
    choices, most = row["choices"], len(LETTERS) - len(UNCERTAIN_OPTIONS)
    if not 2 <= len(choices) <= most:
        raise DataError("'choices' has a wrong number of options", allowed=f"2 to {most}", got=len(choices))
    if any(not isinstance(choice, str) or not choice.strip() for choice in choices):
        raise DataError("'choices' must be texts that are not empty", got=choices)
    if not 0 <= row["answer"] < len(choices):
        raise DataError("'answer' is not the index of a choice", allowed=f"0 to {len(choices) - 1}", got=row["answer"])
    if row.get("split", "test") not in SPLITS:
        raise DataError("'split' is unknown", allowed=SPLITS, got=row["split"])
    if kind_of(row) not in PASSAGES:
        raise DataError("'kind' is unknown", allowed=PASSAGES, got=row["kind"])
    added = row.get("uncertain", UNCERTAIN_OPTIONS)
    if len(added) != len(UNCERTAIN_OPTIONS) or any(not isinstance(text, str) or not text.strip() for text in added):
        raise DataError("'uncertain' must be the texts of the options E and F", got=added)
    if (PASSAGES[kind_of(row)] is None) == bool((row.get("context") or "").strip()):
        raise DataError("'context' is what every kind of question but QA is asked about", got=kind_of(row))


@dataclass(frozen=True, kw_only=True)
class _Twin:
    """One way to show the items of a file: as they are, with options E and F, or in every order.

    Attributes
    ----------
    name, family : str
        The task's name and its family (see `Items`).
    style : PromptStyle
        How the questions are shown.
    orders : callable (row) -> list of orders
        The answer orders that are shown; the first is the original one.
    six : bool
        Whether the options E and F stand behind the row's own.
    """

    name: str
    family: str
    style: PromptStyle
    orders: Callable[[Row], list[list[int]]]
    six: bool = False

    def options(self, row: Row, order: Sequence[int]) -> list[str]:
        """Return the options as they are shown in an order."""
        added = row.get("uncertain", UNCERTAIN_OPTIONS) if self.six else ()
        return [*(row["choices"][content] for content in order), *added]


def _headers(
    examples: Mapping[str, Sequence[Row]], settings: TaskSettings, twin: _Twin
) -> Callable[[str, str, int], str]:
    """Return what stands before a question, by category, kind and permutation.

    [ORDER] does not say whether the examples are shuffled: here they stay as they are unless
    `settings.shuffle_examples` is set, and the original order (permutation 0) always has them as they are. All items
    of a category share a permutation's header, so that scoring computes it once.
    """

    @cache
    def header(category: str, kind: str, permutation: int) -> str:
        shown = examples.get(category, [])[: settings.shots]
        if settings.shuffle_examples and permutation:
            shown = [reordered(row, settings, permutation) for row in shown]
        texts = [
            f"{twin.style.question(row, twin.options(row, identity(row)))} {LETTERS[row['answer']]}" for row in shown
        ]
        return twin.style.header(category, kind, texts)

    return header


def _task(twin: _Twin, rows: Sequence[Row], examples: Mapping[str, Sequence[Row]], settings: TaskSettings) -> Task:
    """Build one task: the items, and one request per order and letter."""
    header = _headers(examples, settings, twin)
    requests: list[Request] = []
    items = []
    for row in rows:
        for permutation, order in enumerate(twin.orders(row)):
            shown = twin.options(row, order)
            contents = order + list(range(len(order), len(shown)))
            context = header(row["category"], kind_of(row), permutation) + twin.style.question(row, shown)
            requests += [
                request(
                    twin.name, row, context, LETTERS[option], option=option, content=content, permutation=permutation
                )
                for option, content in enumerate(contents)
            ]
            if permutation == 0:
                asked = "\n".join([*([row["context"]] if row.get("context") else []), row["question"]])
                columns = {"question": asked, "prompt": context, "options": shown, "gold": row["answer"]}
                items.append(item_row(twin.name, twin.family, "loglik", row, **columns))
    return Task(
        name=twin.name,
        family=twin.family,
        items=Items.from_rows(items),
        requests=tuple(requests),
        chat=settings.apply_chat_template,
    )


def _examples(name: str, rows: Sequence[Row], tests: Sequence[Row], settings: TaskSettings) -> dict[str, list[Row]]:
    """Return the few-shot examples by category: the rows marked "dev"."""
    examples: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("split", "test") == "dev":
            examples.setdefault(row["category"], []).append(row)
    for category in dict.fromkeys(row["category"] for row in tests):
        if len(examples.get(category, [])) < settings.shots:
            raise DataError(
                f"Category {category!r} of {name} has too few few-shot examples (rows with split 'dev')",
                allowed=f"{settings.shots} or more",
                got=len(examples.get(category, [])),
                fix="Add examples or lower 'shots'",
            )
    return examples


def _own_style(styles: Mapping[str, PromptStyle], rows: Sequence[Row]) -> str:
    """Return the first style whose wording is true of the questions as they are.

    Raises
    ------
    ConfigError
        When there is none.
    """
    sizes = {len(row["choices"]) for row in rows}
    for name, style in styles.items():
        if style.n_options is None or sizes == {style.n_options}:
            return name
    raise ConfigError(
        "No style of 'prompt_style' can show the questions without the options E and F: 'shared' speaks of six options",
        got=",".join(styles),
        fix="Name another style too: -P prompt_style=base,shared",
    )


def _build(name: str, rows: Sequence[Row], settings: TaskSettings) -> list[Task]:
    """Return the task, its six-option twin in every prompt style, and where asked for the twin of all orders.

    The first style shows the plain questions, whose flips and shuffles count each item once; UAcc is the mean over all
    styles, each a task of its own. Questions that have not four options have no six-option twin. Tasks in another
    style than the default one are named after it.
    """
    styles = styles_of(settings.prompt)
    tests = limited(name, [row for row in rows if row.get("split", "test") == "test"], settings)
    examples = _examples(name, rows, tests, settings)
    names = {style: name if style == DEFAULT else f"{name}_{style}" for style in styles}
    own = _own_style(styles, tests)
    plain = _Twin(
        name=names[own], family="lettered", style=styles[own], orders=lambda row: shuffled_orders(row, settings)
    )
    tasks = [_task(plain, tests, examples, settings)]
    four = [row for row in tests if len(row["choices"]) == OWN_OPTIONS]
    for style in styles if four else ():
        six = _Twin(
            name=f"{names[style]}_six",
            family="lettered_six",
            style=styles[style],
            orders=lambda row: [identity(row)],
            six=True,
        )
        tasks.append(_task(six, four, examples, settings))
    if settings.all_orders:
        every = _Twin(name=f"{names[own]}_orders", family="lettered_orders", style=styles[own], orders=every_order)
        tasks.append(_task(every, sampled(name, tests, settings), examples, settings))
    return tasks


register_family(
    "lettered",
    Family(
        fields={"question": str, "choices": list, "answer": int},
        optional={"context": str, "kind": str, "split": str, "uncertain": list},
        check=_check,
        build=_build,
        items={
            "lettered": ItemFamily(chooses=True, graded=True, headline=True, by_category=True),
            "lettered_six": ItemFamily(chooses=True),  # read by the conformal metrics alone
            "lettered_orders": ItemFamily(chooses=True, every_order=True),
        },
    ),
)
