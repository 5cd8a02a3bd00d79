"""Multiple-choice data sets in hub layout as lettered tasks. (The harness's own tasks score the options' texts.)

Where test answers are not public, the validation split is used.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mlflow_compress.errors import DataError
from mlflow_compress.items.named_tasks import TASKS, NamedTask
from mlflow_compress.items.prompt_style import LETTERS
from mlflow_compress.items.sources.data_dir import load_split
from mlflow_compress.items.sources.question_files import read_text
from mlflow_compress.items.task import FAMILIES, Parts, TaskSettings

_RULE = "argmax of the letter's log-likelihood, on every order"
_SHOTS = "`-P num_fewshot=` (5)"
_MOST_EXAMPLES = 32  # rows that are read of the split with the few-shot examples

R = TypeVar("R")
DatasetRow = Mapping[str, Any]  # one row of a data set
_FirstFields = Callable[[int], dict[str, Any]]  # the first fields of a row of a question file, by its number


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A data set and how its rows become questions."""

    dataset: str  # Hub id and configuration (None if there is only one)
    config: str | None = None
    revision: str | None = None  # Revision of the hub's copy; None for the newest
    # Names of splits. The first rows of `examples` are few-shot examples. All rows of `test` are evaluated.
    examples: str = "train"
    test: str
    category: str  # Topic of the questions, for the prompt style `hendrycks`
    # Returns the fields "question", "choices" and "answer", and with a passage also "context" and "kind"
    question: Callable[[DatasetRow], dict[str, Any]]

    def rows(self, task: str, data_dir: str) -> list[dict[str, Any]]:
        """Return few-shot examples and questions as rows of a question file."""
        load = partial(load_split, self.dataset, self.config, data_dir=data_dir, task=task, revision=self.revision)
        examples, questions = load(self.examples), load(self.test)
        examples = examples.select(range(min(_MOST_EXAMPLES, len(examples))))
        place = ", ".join(part for part in (self.dataset, self.config) if part)
        dev, test = head_of("dev", self.category), head_of("test", self.category)
        return [
            *checked_rows(enumerate(examples), dev, self.question, f"{place}, {self.examples}, row"),
            *checked_rows(enumerate(questions), test, self.question, f"{place}, {self.test}, row"),
        ]


def checked_rows(
    records: Iterable[tuple[int, R]], head: _FirstFields, question: Callable[[R], dict[str, Any]], place: str
) -> list[dict[str, Any]]:
    """Return numbered records as checked rows of a question file. Errors have `place` and the number."""
    family = FAMILIES.get("lettered")
    rows = []
    for number, record in records:
        try:
            rows.append({**head(number), **question(record)})
            family.check(rows[-1])
        except (DataError, KeyError, TypeError, ValueError) as error:
            why = str(error) if isinstance(error, DataError) else f"not in the data set's layout ({error!r})"
            raise DataError(f"{place} {number}: {why}") from error
    return rows


def head_of(split: str, category: str, prefix: str = "") -> _FirstFields:
    """Return what gives the first fields of the rows of a split."""
    return lambda number: {"id": f"{prefix}{split}-{number}", "category": category, "split": split}


def _labelled(record: DatasetRow, text: str = "question") -> dict[str, Any]:
    """Return the question of a record in ARC's layout. Options get letters by position, whatever their labels are."""
    labels = list(record["choices"]["label"])
    if record["answerKey"] not in labels:
        raise DataError("'answerKey' is not the label of a choice", allowed=labels, got=record["answerKey"])
    choices = list(record["choices"]["text"])
    return {"question": record[text], "choices": choices, "answer": labels.index(record["answerKey"])}


def register_lettered(
    name: str,
    rows: Callable[[str, str], list[dict[str, Any]]],
    *,
    definition: str,
    prompts: str = "auto",
    shots: int | None = None,
    **described: Any,
) -> None:
    """Register a data set as a named task.

    `rows` takes the task's name and the folder of data sets; `prompts` and `shots` are those where the user gives no
    others, `described` the other fields of `NamedTask`.
    """

    def build(settings: TaskSettings, given: int | None) -> Parts:
        if settings.prompt_style == "auto":
            settings = replace(settings, prompt_style=prompts)
        given = shots if given is None else given
        chosen = settings if given is None else replace(settings, num_fewshot=given)
        return Parts(tasks=tuple(FAMILIES.get("lettered").build(name, rows(name, settings.data_dir), chosen)))

    shown = _SHOTS if shots is None else str(shots)
    TASKS.register(name)(NamedTask(**described, shots=shown, rule=_RULE, definition=definition.encode, build=build))


def _register_hub_tasks(name: str, source: _Source, *, licence: str, items: str) -> None:
    """Register a data set in hub layout as a named task."""
    register_lettered(
        name,
        source.rows,
        source=", ".join(part for part in (source.dataset, source.config) if part),
        licence=licence,
        items=items,
        definition=f"{source.dataset} {source.config} {source.examples} {source.test} {source.category} lettered",
    )


for _name, _config, _items in (
    ("arc_challenge_lettered", "ARC-Challenge", "1,172 test"),
    ("arc_easy_lettered", "ARC-Easy", "2,376 test"),
):
    _register_hub_tasks(
        _name,
        _Source(dataset="allenai/ai2_arc", config=_config, test="test", category="science", question=_labelled),
        licence="CC BY-SA 4.0",
        items=f"{_items} (with four options: each also with the options E and F)",
    )

_register_hub_tasks(
    "commonsense_qa_lettered",
    _Source(dataset="tau/commonsense_qa", test="validation", category="common sense", question=_labelled),
    licence="MIT",
    items="1,221 validation, five options",  # so without the options E and F
)

_register_hub_tasks(
    "openbookqa_lettered",
    _Source(
        dataset="allenai/openbookqa",
        config="main",
        test="test",
        category="science",
        question=partial(_labelled, text="question_stem"),
    ),
    licence="not stated",
    items="500 test (each also with the options E and F)",
)


def cosmos_qa_question(record: DatasetRow) -> dict[str, Any]:
    """Return the story as the passage, and the four answers."""
    return {
        "kind": "RC",
        "context": record["context"],
        "question": record["question"],
        "choices": [record[f"answer{number}"] for number in range(4)],
        "answer": int(record["label"]),
    }


_register_hub_tasks(
    "cosmos_qa_lettered",
    _Source(
        dataset="allenai/cosmos_qa",
        # The hub's copy is a script, which current versions of `datasets` do not run; its Parquet files are here. The
        # original files train.csv and valid.csv can be used instead.
        revision="refs/convert/parquet",
        test="validation",
        category="everyday life",
        question=cosmos_qa_question,
    ),
    licence="CC BY 4.0",
    items="2,985 validation (each also with the options E and F)",
)


_HELLASWAG_QUESTION = "Which of these is the most likely continuation?"  # ours, because the data set has none


def _without_marks(text: str) -> str:
    """Return a text without WikiHow's marks ("[header]", "[title]" ...), as in lm-evaluation-harness's hellaswag."""
    cleaned = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return cleaned.replace("  ", " ")


def hellaswag_question(record: DatasetRow) -> dict[str, Any]:
    """Return the question: activity and beginning are the passage, the four endings are the options."""
    beginning = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
    return {
        "kind": "CI",
        "context": _without_marks(beginning),
        "question": _HELLASWAG_QUESTION,
        "choices": [_without_marks(ending) for ending in record["endings"]],
        "answer": int(record["label"]),
    }


_register_hub_tasks(
    "hellaswag_lettered",
    _Source(dataset="Rowan/hellaswag", test="validation", category="common sense", question=hellaswag_question),
    licence="MIT",
    items="10,042 validation (each also with the options E and F)",
)


MMLU = "cais/mmlu"
_NAMES = {
    "STEM": """
        abstract_algebra anatomy astronomy college_biology college_chemistry college_computer_science
        college_mathematics college_physics computer_security conceptual_physics electrical_engineering
        elementary_mathematics high_school_biology high_school_chemistry high_school_computer_science
        high_school_mathematics high_school_physics high_school_statistics machine_learning
    """,
    "humanities": """
        formal_logic high_school_european_history high_school_us_history high_school_world_history
        international_law jurisprudence logical_fallacies moral_disputes moral_scenarios philosophy
        prehistory professional_law world_religions
    """,
    "social sciences": """
        econometrics high_school_geography high_school_government_and_politics high_school_macroeconomics
        high_school_microeconomics high_school_psychology human_sexuality professional_psychology
        public_relations security_studies sociology us_foreign_policy
    """,
    "other": """
        business_ethics clinical_knowledge college_medicine global_facts human_aging management marketing
        medical_genetics miscellaneous nutrition professional_accounting professional_medicine virology
    """,
}
CATEGORIES = {category: subjects.split() for category, subjects in _NAMES.items()}
"""Subjects by MMLU's four categories."""
SUBJECTS = sorted(subject for subjects in CATEGORIES.values() for subject in subjects)


def subject_rows(subject: str, data_dir: str, *, task: str) -> list[dict[str, Any]]:
    """Return a subject's questions as rows of a question file, "dev" rows first.

    `data_dir` has the data set in hub layout, or the original release's folder `data` (dev/anatomy_dev.csv ...).
    """
    rows: list[dict[str, Any]] = []
    for split in ("dev", "test"):
        csv_file = Path(data_dir) / MMLU / split / f"{subject}_{split}.csv"
        if data_dir and csv_file.is_file():
            records: Iterable[Any] = _mmlu_original(csv_file)
        else:
            records = load_split(MMLU, subject, split, data_dir=data_dir, task=task)
        head = head_of(split, subject, prefix=f"{subject}-")
        rows += checked_rows(enumerate(records), head, _mmlu_question, f"{MMLU}, {subject}, {split}, row")
    return rows


def _mmlu_question(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"question": row["question"], "choices": list(row["choices"]), "answer": int(row["answer"])}


def _mmlu_original(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of the original release: question, four choices and a letter, without a header."""
    for number, row in enumerate(csv.reader(io.StringIO(read_text(path))), start=1):
        if len(row) != 6 or row[5] not in LETTERS[:4]:
            raise DataError(f"{path}, record {number}: not a question, four choices and a letter A to D", got=row)
        yield {"question": row[0], "choices": row[1:5], "answer": LETTERS.index(row[5])}


register_lettered(
    "mmlu_lettered",
    lambda task, data_dir: [row for subject in SUBJECTS for row in subject_rows(subject, data_dir, task=task)],
    source=MMLU,
    licence="MIT",
    items="14,042 test, 57 subjects (each also with the options E and F)",
    definition=f"{MMLU} {SUBJECTS} lettered",
)
