"""HaluEval's dialogues and summaries as lettered multiple choice.

The four options are the correct text, the hallucinated text, and two texts of other questions. The uncertainty
benchmark does the same, but publishes neither which texts it drew nor how it words the questions (see `uncertainty`).
So the draws (always with seed 42) and the wording are ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlflow_compress.errors import DataError
from mlflow_compress.items.named.hub_choice import DatasetRow, checked_rows, head_of, register_lettered
from mlflow_compress.items.sources.data_dir import load_split
from mlflow_compress.items.sources.question_files import read_jsonl
from mlflow_compress.items.task import TaskSettings, seeded

HALUEVAL_DATASET = "pminervini/HaluEval"
EXAMPLES = 10  # the first rows are few-shot examples, because there is only one split
_OPTIONS = 4


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of the two parts: the names of its fields, and the wording of its question."""

    config: str
    kind: str
    passage: str
    right: str
    wrong: str
    category: str
    question: str


DIALOGUE = Part(
    config="dialogue",
    kind="DRS",
    passage="dialogue_history",
    right="right_response",
    wrong="hallucinated_response",
    category="dialogues",
    question="Which of these is the best response?",
)
SUMMARIZATION = Part(
    config="summarization",
    kind="DS",
    passage="document",
    right="right_summary",
    wrong="hallucinated_summary",
    category="documents",
    question="Which of these is the best summary?",
)


def halueval_records(part: Part, task: str, data_dir: str) -> Sequence[DatasetRow]:
    """Return the rows of the data set, or of the original repository's file if that is in its folder."""
    original = Path(data_dir) / HALUEVAL_DATASET / "data" / f"{part.config}_data.json"
    if data_dir and original.is_file():
        return read_jsonl(original)
    return list(load_split(HALUEVAL_DATASET, part.config, "data", data_dir=data_dir, task=task))


def question(part: Part, records: Sequence[DatasetRow], number: int) -> dict[str, Any]:
    """Return the question of a record, as fields of a question file."""
    draw = seeded(TaskSettings(), HALUEVAL_DATASET, part.config, number)
    right = records[number][part.right]
    choices = [right, records[number][part.wrong]]
    while len(choices) < _OPTIONS:
        text = records[draw.randrange(len(records))][draw.choice((part.right, part.wrong))]
        if text not in choices:
            choices.append(text)
    draw.shuffle(choices)
    shown = {"kind": part.kind, "context": records[number][part.passage], "question": part.question}
    return {**shown, "choices": choices, "answer": choices.index(right)}


def _rows(part: Part, task: str, data_dir: str) -> list[dict[str, Any]]:
    records = halueval_records(part, task, data_dir)
    if len({record[part.right] for record in records}) < EXAMPLES:
        raise DataError(
            f"{HALUEVAL_DATASET}, {part.config}: fewer than {EXAMPLES} different texts", got=f"{len(records)} rows"
        )

    def rows(split: str, numbers: range) -> list[dict[str, Any]]:
        head, ask = head_of(split, part.category), partial(question, part, records)
        return checked_rows(zip(numbers, numbers, strict=True), head, ask, f"{HALUEVAL_DATASET}, {part.config}, row")

    return rows("dev", range(EXAMPLES)) + rows("test", range(EXAMPLES, len(records)))


for _name, _part in (("halueval_dialogue_lettered", DIALOGUE), ("halueval_summarization_lettered", SUMMARIZATION)):
    register_lettered(
        _name,
        partial(_rows, _part),
        source=f"{HALUEVAL_DATASET}, {_part.config}",
        licence="Apache-2.0 (hub card)",
        items="9,990 (each also with the options E and F)",
        definition=f"{HALUEVAL_DATASET} {_part} {EXAMPLES} examples lettered",
    )
