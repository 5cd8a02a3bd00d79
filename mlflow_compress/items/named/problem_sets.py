"""Problems for models that think, read from data sets in hub layout."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlflow_compress.errors import DataError
from mlflow_compress.items.named_tasks import TASKS, NamedTask
from mlflow_compress.items.sources.data_dir import load_split
from mlflow_compress.items.task import FAMILIES, Parts, TaskSettings, seeded

_DatasetRow = Mapping[str, Any]  # one row of a data set
_BOXED = "\n\nThink step by step, and put the final answer into \\boxed{}."
_LETTER = "\n\nThink step by step, and end with the letter of the right answer in \\boxed{}."


@dataclass(frozen=True, kw_only=True)
class _ProblemSet:
    """A data set and how its rows become problems."""

    dataset: str  # Hub id, configuration (None if there is only one) and split
    config: str | None = None
    split: str
    compare: str  # How answers are compared: one of `reasoning.COMPARISONS`
    most_tokens: int  # Longest answer, thought included, where the user gives none
    asks: str = _BOXED  # What follows the question
    # Returns "question", "answer" and "category"; what it draws depends on the seed and the row's number alone
    problem: Callable[[_DatasetRow, int, TaskSettings], dict[str, str]]

    def build(self, name: str, settings: TaskSettings) -> Parts:
        """Return the task; a row in another layout is a `DataError`."""
        family, rows = FAMILIES.get("thinking"), []
        records = load_split(self.dataset, self.config, self.split, data_dir=settings.data_dir, task=name)
        for number, record in enumerate(records):
            try:
                row = self.problem(record, number, settings)
                row |= {"id": f"{self.split}-{number}", "compare": self.compare}
                row["question"] += self.asks
                family.check(row)
            except (DataError, KeyError, TypeError, ValueError, AttributeError) as error:
                why = str(error) if isinstance(error, DataError) else f"not in the data set's layout ({error!r})"
                raise DataError(f"{self.dataset}, {self.split}, row {number}: {why}") from error
            rows.append(row)
        if settings.thinking_max_new_tokens == "auto":
            settings = replace(settings, thinking_max_new_tokens=self.most_tokens)
        return Parts(tasks=tuple(family.build(name, rows, settings)))


def _register_problems(name: str, source: _ProblemSet, *, licence: str, items: str, rule: str) -> None:
    """Register a data set as a named task."""
    asked = (source.dataset, source.config, source.split, source.compare, source.most_tokens, source.asks)
    TASKS.register(name)(
        NamedTask(
            source=", ".join(part for part in (source.dataset, source.config) if part),
            licence=licence,
            items=items,
            shots="",
            rule=f"{rule}; at most {source.most_tokens:,} tokens, or `task_args: thinking_max_new_tokens`",
            definition=lambda: f"{asked} thinking".encode(),
            build=lambda settings, shots: source.build(name, settings),
        )
    )


_register_problems(
    "math500",
    _ProblemSet(
        dataset="HuggingFaceH4/MATH-500",
        split="test",
        compare="math",
        most_tokens=16_384,
        problem=lambda row, number, settings: {
            "question": row["problem"].strip(),
            "answer": row["answer"].strip(),
            "category": row["subject"],
        },
    ),
    licence="not stated (MATH: MIT)",
    items="500 test",
    rule="math-verify (the extra `math`) finds the formula behind the thought equal",
)


def _aime(row: _DatasetRow, number: int, settings: TaskSettings) -> dict[str, str]:
    return {"question": row["problem"].strip(), "answer": str(row["answer"]).strip(), "category": "AIME"}


for _name, _dataset, _split, _licence in (
    ("aime24", "HuggingFaceH4/aime_2024", "train", "not stated"),
    ("aime25", "math-ai/aime25", "test", "Apache-2.0 (hub card)"),
):
    _register_problems(
        _name,
        _ProblemSet(dataset=_dataset, split=_split, compare="number", most_tokens=32_768, problem=_aime),
        licence=_licence,
        items=f"30 {_split}",
        rule="the number behind the thought is the answer, a whole number",
    )


def _gpqa(row: _DatasetRow, number: int, settings: TaskSettings) -> dict[str, str]:
    """Return the question with its four answers, in an order drawn with the seed."""
    answers = [row["Correct Answer"].strip(), *(row[f"Incorrect Answer {n}"].strip() for n in (1, 2, 3))]
    order = seeded(settings, "gpqa_diamond", number).sample(range(4), 4)
    shown = "\n".join(f"({letter}) {answers[place]}" for letter, place in zip("ABCD", order, strict=True))
    question = f"{row['Question'].strip()}\n\n{shown}"
    return {"question": question, "answer": "ABCD"[order.index(0)], "category": row["High-level domain"]}


_register_problems(
    "gpqa_diamond",
    _ProblemSet(
        dataset="Idavidrein/gpqa",
        config="gpqa_diamond",
        split="train",
        compare="letter",
        most_tokens=32_768,
        asks=_LETTER,
        problem=_gpqa,
    ),
    licence="CC BY 4.0 (its owners ask for consent, and not to publish examples)",
    items="198 train",
    rule="the letter behind the thought; the order of the four answers is drawn with the seed",
)


def _gsm8k(row: _DatasetRow, number: int, settings: TaskSettings) -> dict[str, str]:
    _, mark, answer = row["answer"].rpartition("####")
    if not mark:
        raise DataError("'answer' has no '####' before the number", got=row["answer"])
    return {"question": row["question"].strip(), "answer": answer.strip(), "category": "GSM8K"}


_register_problems(
    "gsm8k_thinking",
    _ProblemSet(
        dataset="openai/gsm8k", config="main", split="test", compare="number", most_tokens=8_192, problem=_gsm8k
    ),
    licence="MIT",
    items="1,319 test",
    rule="the number behind the thought is the one after '####'",
)
