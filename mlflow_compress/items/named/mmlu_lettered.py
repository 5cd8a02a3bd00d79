"""MMLU as lettered multiple choice, with shuffled answers and also with the options E and F.

The harness's task `mmlu` has neither. The prompt is the original benchmark's. Subjects such as "abstract_algebra" are
shown with spaces.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlflow_compress.errors import DataError
from mlflow_compress.items.named.hub_choice import checked_rows, head_of, register_lettered
from mlflow_compress.items.prompt_style import LETTERS
from mlflow_compress.items.sources.data_dir import load_split
from mlflow_compress.items.sources.question_files import read_text

DATASET = "cais/mmlu"
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

    Raises `DataError`: the data set is missing, or a row cannot be used.
    """
    rows: list[dict[str, Any]] = []
    for split in ("dev", "test"):
        csv_file = Path(data_dir) / DATASET / split / f"{subject}_{split}.csv"
        if data_dir and csv_file.is_file():
            records: Iterable[Any] = _original(csv_file)
        else:
            records = load_split(DATASET, subject, split, data_dir=data_dir, task=task)
        head = head_of(split, subject, prefix=f"{subject}-")
        rows += checked_rows(enumerate(records), head, _question, f"{DATASET}, {subject}, {split}, row")
    return rows


def _question(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"question": row["question"], "choices": list(row["choices"]), "answer": int(row["answer"])}


def _original(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of the original release: question, four choices and a letter, without a header."""
    for number, row in enumerate(csv.reader(io.StringIO(read_text(path))), start=1):
        if len(row) != 6 or row[5] not in LETTERS[:4]:
            raise DataError(f"{path}, record {number}: not a question, four choices and a letter A to D", got=row)
        yield {"question": row[0], "choices": row[1:5], "answer": LETTERS.index(row[5])}


register_lettered(
    "mmlu_lettered",
    lambda task, data_dir: [row for subject in SUBJECTS for row in subject_rows(subject, data_dir, task=task)],
    source=DATASET,
    licence="MIT",
    items="14,042 test, 57 subjects (each also with the options E and F)",
    definition=f"{DATASET} {SUBJECTS}",
)
