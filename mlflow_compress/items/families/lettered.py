"""Lettered multiple choice: the answer is the letter of an option. Few-shot, in one or several prompt styles."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from math import factorial

from mlflow_compress.errors import ConfigError, DataError, UnsupportedError
from mlflow_compress.item_families import ItemFamily
from mlflow_compress.items import task
from mlflow_compress.items.prompt_style import DEFAULT, LETTERS, PASSAGES, PromptStyle, kind_of, styles_of
from mlflow_compress.records import Items, Request

_MOST_OPTIONS = 4  # most options of a question that is scored in all orders (24 for four options)


def _unchanged_order(row: task.Row) -> list[int]:
    """Return the original order: 0, 1, 2, ..."""
    return list(range(len(row["choices"])))


def _drawn_order(row: task.Row, settings: task.TaskSettings, number: int) -> list[int]:
    """Return shuffle `number` of a row's answers, drawn uniformly from all permutations; 0 is the original order."""
    order = _unchanged_order(row)
    return task.seeded(settings, row["id"], number).sample(order, len(order)) if number else order


def _sampled(name: str, rows: Sequence[task.Row], settings: task.TaskSettings) -> list[task.Row]:
    """Return the rows to score in every order: a seeded sample of those with at most four options, in file order."""
    few = [row for row in rows if len(row["choices"]) <= _MOST_OPTIONS]
    if rows and not few:
        first = rows[0]
        raise UnsupportedError(
            f"All orders of {len(first['choices'])} options are too many ({factorial(len(first['choices']))})",
            allowed=f"at most {_MOST_OPTIONS} options ({factorial(_MOST_OPTIONS)} orders)",
            got=f"{name}/{first['id']}",
            fix="Give all_orders=0, or tasks of at most four options",
        )
    chosen = task.seeded(settings, name, "all orders").sample(range(len(few)), min(settings.all_orders, len(few)))
    return [few[index] for index in sorted(chosen)]


_UNCERTAIN_OPTIONS = ("I don't know", "None of the above")  # E and F of the uncertainty benchmark
_OWN_OPTIONS = 4  # number of options of a question that is also asked with the options E and F


def _check(row: task.Row) -> None:
    choices, most = row["choices"], len(LETTERS) - len(_UNCERTAIN_OPTIONS)
    if not 2 <= len(choices) <= most:
        raise DataError("'choices' has a wrong number of options", allowed=f"2 to {most}", got=len(choices))
    if any(not isinstance(choice, str) or not choice.strip() for choice in choices):
        raise DataError("'choices' must be texts that are not empty", got=choices)
    task.check_answer(row)
    if row.get("split", "test") not in ("dev", "test"):
        raise DataError("'split' is unknown", allowed=("dev", "test"), got=row["split"])
    if kind_of(row) not in PASSAGES:
        raise DataError("'kind' is unknown", allowed=PASSAGES, got=row["kind"])
    added = row.get("uncertain", _UNCERTAIN_OPTIONS)
    if len(added) != len(_UNCERTAIN_OPTIONS) or any(not isinstance(text, str) or not text.strip() for text in added):
        raise DataError("'uncertain' must be the texts of the options E and F", got=added)
    if (PASSAGES[kind_of(row)] is None) == bool((row.get("context") or "").strip()):
        raise DataError(
            "Questions of every kind except QA must have a 'context', and QA must have none", got=kind_of(row)
        )


@dataclass(frozen=True, kw_only=True)
class _Variation:
    """One task made from a file: its items as they are, with the options E and F, or in every answer order."""

    name: str  # The task's name and its family (see `Items`)
    family: str
    style: PromptStyle  # The prompt style
    orders: Callable[[task.Row], list[list[int]]]  # The answer orders of a row; the first one is the original order
    six: bool = False  # Whether the options E and F follow the row's own options

    def options(self, row: task.Row, order: Sequence[int]) -> list[str]:
        added = row.get("uncertain", _UNCERTAIN_OPTIONS) if self.six else ()
        return [*(row["choices"][content] for content in order), *added]


def _task(
    variation: _Variation,
    rows: Sequence[task.Row],
    examples: Mapping[str, Sequence[task.Row]],
    settings: task.TaskSettings,
) -> task.Task:
    """Return one task: its items, and one request per item, answer order and letter."""

    @cache  # all items of a category share one header per permutation, so that scoring computes it once
    def header(category: str, kind: str, permutation: int) -> str:
        """Return instructions and few-shot examples.

        [ORDER] does not say whether the answers of the examples are shuffled. Here they are shuffled only if
        `settings.shuffle_fewshot` is set, and never in the original order (permutation 0).
        """
        texts = []
        for row in examples.get(category, [])[: settings.num_fewshot]:
            order = _drawn_order(row, settings, permutation if settings.shuffle_fewshot else 0)
            question = variation.style.question(row, variation.options(row, order))
            texts.append(f"{question} {LETTERS[order.index(row['answer'])]}")
        return variation.style.header(category, kind, texts)

    requests: list[Request] = []
    items = []
    for row in rows:
        for permutation, order in enumerate(variation.orders(row)):
            shown = variation.options(row, order)
            contents = order + list(range(len(order), len(shown)))
            context = header(row["category"], kind_of(row), permutation) + variation.style.question(row, shown)
            requests += [
                task.request(
                    variation.name, row, context, LETTERS[option], option, content=content, permutation=permutation
                )
                for option, content in enumerate(contents)
            ]
            if permutation == 0:
                with_context = "\n".join([*([row["context"]] if row.get("context") else []), row["question"]])
                columns = {"question": with_context, "prompt": context, "options": shown, "gold": row["answer"]}
                columns["group_id"] = row.get("group_id") or task.group_of(row.get("context"))
                items.append(task.item_row(variation.name, variation.family, "loglik", row, **columns))
    return task.Task(
        name=variation.name,
        family=variation.family,
        items=Items.from_rows(items),
        requests=tuple(requests),
        chat=settings.apply_chat_template,
    )


def _examples(
    name: str, rows: Sequence[task.Row], tests: Sequence[task.Row], settings: task.TaskSettings
) -> dict[str, list[task.Row]]:
    examples: dict[str, list[task.Row]] = {}
    for row in rows:
        if row.get("split", "test") == "dev":
            examples.setdefault(row["category"], []).append(row)
    for category in dict.fromkeys(row["category"] for row in tests):
        if len(examples.get(category, [])) < settings.num_fewshot:
            raise DataError(
                f"Category {category!r} of {name} has too few few-shot examples (rows with split 'dev')",
                allowed=f"{settings.num_fewshot} or more",
                got=len(examples.get(category, [])),
                fix="Add examples or lower 'num_fewshot'",
            )
    return examples


def _plain_style(styles: Mapping[str, PromptStyle], rows: Sequence[task.Row]) -> str:
    """Return the first style whose wording fits the questions without the options E and F."""
    sizes = {len(row["choices"]) for row in rows}
    for name, style in styles.items():
        if style.n_options is None or sizes == {style.n_options}:
            return name
    raise ConfigError(
        "No style of 'prompt_style' can show the questions without the options E and F: 'shared' mentions six options",
        got=",".join(styles),
        fix="Name another style too: prompt_style=base,shared",
    )


def _build(name: str, rows: Sequence[task.Row], settings: task.TaskSettings) -> list[task.Task]:
    """Return the plain task, a six-option task per prompt style, and, if asked for, the task of all answer orders.

    The plain task is shown in the first style only, so that flips and order metrics count each item once. The
    six-option tasks are shown in every style, and UAcc is their mean. Questions with other than four options have no
    six-option task. The name of a task in another style than the default one ends in that style's name.
    """
    styles = styles_of(settings.prompt_style)
    tests = task.limited(name, [row for row in rows if row.get("split", "test") == "test"], settings)
    examples = _examples(name, rows, tests, settings)
    names = {style: name if style == DEFAULT else f"{name}_{style}" for style in styles}
    first = _plain_style(styles, tests)

    plain = _Variation(
        name=names[first],
        family="lettered",
        style=styles[first],
        orders=lambda row: [_drawn_order(row, settings, number) for number in range(settings.num_shuffles + 1)],
    )
    tasks = [_task(plain, tests, examples, settings)]
    four = [row for row in tests if len(row["choices"]) == _OWN_OPTIONS]
    for style in styles if four else ():
        six = _Variation(
            name=f"{names[style]}_six",
            family="lettered_six",
            style=styles[style],
            orders=lambda row: [_unchanged_order(row)],
            six=True,
        )
        tasks.append(_task(six, four, examples, settings))
    if settings.all_orders:
        every = _Variation(
            name=f"{names[first]}_orders",
            family="lettered_orders",
            style=styles[first],
            orders=lambda row: [list(order) for order in permutations(_unchanged_order(row))],  # lexicographic
        )
        tasks.append(_task(every, _sampled(name, tests, settings), examples, settings))
    return tasks


task.register_family(
    "lettered",
    task.Family(
        fields={"question": str, "choices": list, "answer": int},
        optional={"context": str, "kind": str, "split": str, "uncertain": list},
        check=_check,
        build=_build,
        items={
            "lettered": ItemFamily(chooses=True, graded=True, headline=True, by_category=True),
            "lettered_six": ItemFamily(chooses=True, again=True),  # read by the conformal metrics alone
            "lettered_orders": ItemFamily(chooses=True, every_order=True, again=True),
        },
    ),
)
