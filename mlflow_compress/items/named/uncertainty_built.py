"""The five task types of "Benchmarking LLMs via Uncertainty Quantification", built from their public sources.

Use this if you have the sources, but not the benchmark's files (see `uncertainty`).

The same as there: 10,000 questions per type if the source has them; a quarter of MMLU's from each of its four
categories; CosmosQA's and HellaSwag's from the splits with public answers; HaluEval's two texts with two texts of other
questions; the few-shot examples, the questions that are never asked, the options E and F, and the prompts.
Different, because it is not published: which questions are drawn (here always with seed 42), and the wording of
HellaSwag's and HaluEval's questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mlflow_compress.errors import DataError
from mlflow_compress.items.named import (
    cosmos_qa_lettered,
    halueval_lettered,
    hellaswag_lettered,
    mmlu_lettered,
    uncertainty,
)
from mlflow_compress.items.sources.data_dir import load_split
from mlflow_compress.items.task import FAMILIES, TaskSettings, seeded

Question = dict[str, Any]
DRAWN = 10_000
OTHERS = {
    "RC": ("allenai/cosmos_qa", "refs/convert/parquet", cosmos_qa_lettered.question),
    "CI": ("Rowan/hellaswag", None, hellaswag_lettered.question),
}
HALUEVAL = {"DRS": halueval_lettered.DIALOGUE, "DS": halueval_lettered.SUMMARIZATION}


def _drawn(kind: str, n: int, most: int, *parts: str) -> list[int]:
    return seeded(TaskSettings(), "uncertainty_built", kind, *parts).sample(range(n), min(n, most))


def _from_mmlu(task: str, data_dir: str) -> list[Question]:
    found = []
    for category, subjects in mmlu_lettered.CATEGORIES.items():
        rows = [row for name in subjects for row in mmlu_lettered.subject_rows(name, data_dir, task=task)]
        rows = [row for row in rows if row["split"] == "test"]
        found += [rows[i] for i in _drawn("QA", len(rows), DRAWN // len(mmlu_lettered.CATEGORIES), category)]
    mixed = [found[i] for i in _drawn("QA", len(found), len(found))]
    return [{name: row[name] for name in ("question", "choices", "answer")} for row in mixed]


def _from_splits(kind: str, task: str, data_dir: str) -> list[Question]:
    dataset, revision, question = OTHERS[kind]
    splits = [
        load_split(dataset, None, split, data_dir=data_dir, task=task, revision=revision)
        for split in ("train", "validation")
    ]
    first = len(splits[0])
    drawn = _drawn(kind, sum(map(len, splits)), DRAWN)
    return [question(splits[0][i] if i < first else splits[1][i - first]) for i in drawn]


def _from_halueval(kind: str, task: str, data_dir: str) -> list[Question]:
    part = HALUEVAL[kind]
    records: Sequence[Any] = halueval_lettered.records_of(part, task, data_dir)
    return [halueval_lettered.question(part, records, i) for i in _drawn(kind, len(records), DRAWN)]


BUILDERS: dict[str, Callable[[str, str], list[Question]]] = {
    "QA": _from_mmlu,
    **{kind: partial(_from_splits, kind) for kind in OTHERS},
    **{kind: partial(_from_halueval, kind) for kind in HALUEVAL},
}


def built_rows(name: str, published: uncertainty.Published, data_dir: str) -> list[dict[str, Any]]:
    """Return the task's questions as rows of a question file.

    Raises
    ------
    DataError
        A source is missing, a record cannot be used, or there are too few records.
    """
    family = FAMILIES.get("lettered")
    try:
        questions = BUILDERS[published.kind](name, data_dir)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{name}: a record is not in the data set's layout ({error!r})") from error
    if len(questions) <= max(uncertainty.NEVER_ASKED):
        raise DataError(f"{name}: the source holds too few questions", allowed="10 or more", got=len(questions))
    rows = []
    for number, question in enumerate(questions):
        if number not in uncertainty.NEVER_ASKED or number in published.examples:
            rows.append(uncertainty.placed(published, number, question))
            family.check(rows[-1])
    return rows


SOURCES = {
    "QA": ("cais/mmlu", "MIT"),
    "RC": ("allenai/cosmos_qa", "CC BY 4.0"),
    "CI": ("Rowan/hellaswag", "MIT"),
    "DRS": ("pminervini/HaluEval, dialogue", "Apache-2.0 (hub card)"),
    "DS": ("pminervini/HaluEval, summarization", "Apache-2.0 (hub card)"),
}
MEMBERS = {name.replace("uncertainty", "uncertainty_built"): file for name, file in uncertainty.FILES.items()}


def _described(published: uncertainty.Published) -> tuple[str, str, str]:
    source, licence = SOURCES[published.kind]
    return source, licence, f"{source} {published} {uncertainty.PROMPTS} {DRAWN} built"


uncertainty.register_types("uncertainty_built", MEMBERS, describe=_described, rows=built_rows)
