"""Problems that a model may think about: several answers are drawn of each, and compared behind the thought."""

from collections.abc import Mapping, Sequence

from mlflow_compress.errors import DataError
from mlflow_compress.item_families import ItemFamily
from mlflow_compress.items import task
from mlflow_compress.reasoning import COMPARISONS, agree, parted, read_answer, read_gold
from mlflow_compress.records import Items

_MOST_TOKENS = 8192  # of an answer with its thought, unless the user or the task says otherwise


def _check(row: task.Row) -> None:
    if row["compare"] not in COMPARISONS:
        raise DataError("'compare' is no way to compare answers", allowed=COMPARISONS, got=row["compare"])
    if read_gold(row["answer"], row["compare"]) is None:
        raise DataError(f"'answer' cannot be read as a {row['compare']}", got=row["answer"])


def _build(name: str, rows: Sequence[task.Row], settings: task.TaskSettings) -> list[task.Task]:
    """Return one task without requests: its answers are generated, in the baseline's chat template."""
    most = _MOST_TOKENS if settings.thinking_max_new_tokens == "auto" else settings.thinking_max_new_tokens
    sample = task.limited(name, rows, settings)
    known = {row["id"]: (row["compare"], read_gold(row["answer"], row["compare"])) for row in sample}

    def grade(replies: Mapping[str, str]) -> dict[str, bool | None]:
        """Return which replies are right: one without an answer is not, one that cannot be read is neither."""
        correct: dict[str, bool | None] = {}
        for item, reply in replies.items():
            (compare, gold), (_, answer) = known[item], parted("", reply)
            read = read_answer(answer, compare)
            correct[item] = None if answer and read is None else agree(gold, read, compare)
        return correct

    items = [
        task.item_row(
            name,
            "thinking",
            row["compare"],
            row,
            question=row["question"],
            prompt=row["question"],
            answers=[row["answer"], str(most)],
        )
        for row in sample
    ]
    answering = task.Answering(
        until=(),
        max_new_tokens=most,
        judge=grade,
        samples=settings.thinking_samples,
        thinking=settings.enable_thinking,
    )
    return [task.Task(name=name, family="thinking", items=Items.from_rows(items), answering=answering, chat=True)]


task.register_family(
    "thinking",
    task.Family(
        fields={"question": str, "answer": str, "compare": str},
        check=_check,
        build=_build,
        items={"thinking": ItemFamily(graded=True, by_category=True)},
    ),
)
