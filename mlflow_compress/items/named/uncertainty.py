"""The five task types of "Benchmarking LLMs via Uncertainty Quantification", from its published files.

The files are read unchanged, from the hub's ErikYip/LLM-Uncertainty-Bench or the folder `data` of
smartyfh/LLM-Uncertainty-Bench. Each has 10,000 questions with options A to F. As in the published scripts, the few-shot
examples are fixed questions of the file, and the questions 1, 3, 5, 7 and 9 are never asked, so that 9,995 remain. The
paper describes how questions were drawn from MMLU, CosmosQA, HellaSwag and HaluEval, but without seeds. So the files
cannot be reproduced from the sources. `uncertainty_built` draws other questions in the same way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from mlflow_compress.errors import DataError
from mlflow_compress.files import parse_json
from mlflow_compress.items.named import halueval_lettered, hub_choice
from mlflow_compress.items.named_tasks import TASKS, NamedTask
from mlflow_compress.items.prompt_style import LETTERS
from mlflow_compress.items.sources.data_dir import file_of, load_split
from mlflow_compress.items.sources.question_files import read_text
from mlflow_compress.items.task import TaskSettings, seeded

UNCERTAINTY_DATASET = "ErikYip/LLM-Uncertainty-Bench"
_PROMPTS = "base,shared,task"  # the published numbers are means over these three
_NEVER_ASKED = (1, 3, 5, 7, 9)
_QuestionRow = dict[str, Any]
R = TypeVar("R")
_OWN, _ALL = 4, 6  # options of a question, without and with E and F


@dataclass(frozen=True)
class Published:
    """One of the published files."""

    file: str  # The file's name
    kind: str  # The benchmark's task type
    source: str  # The value of its questions' field "source"
    category: str  # Topic of the questions
    # Questions that serve as few-shot examples (generate_logits.py, `few_shot_exp_ids`)
    examples: tuple[int, ...] = _NEVER_ASKED


PUBLISHED_FILES = {
    "uncertainty_qa": Published("mmlu_10k.json", "QA", "MMLU", "question answering"),
    "uncertainty_rc": Published("cosmosqa_10k.json", "RC", "CosmosQA", "reading comprehension"),
    "uncertainty_ci": Published("hellaswag_10k.json", "CI", "HellaSwag", "commonsense inference"),
    "uncertainty_drs": Published(
        "halu_dialogue.json", "DRS", "Halu-OpenDialKG", "dialogue response selection", (5, 7, 9)
    ),
    "uncertainty_ds": Published("halu_summarization.json", "DS", "Halu-CNN/DailyMail", "document summarization", (9,)),
}


def _question(published: Published, record: Any) -> dict[str, Any]:
    """Return one question; options are turned into text, as the published script shows them."""
    letters, choices = LETTERS[:_ALL], record["choices"]
    if "".join(choices) != letters or record["answer"] not in LETTERS[:_OWN]:
        raise DataError(
            "Not six options A to F of which one of A to D is right", got=f"{list(choices)}, {record['answer']}"
        )
    if record["source"] != published.source:
        raise DataError("The question is of another source", allowed=published.source, got=record["source"])
    options = [str(choices[letter]) for letter in letters]
    question = {
        "question": str(record["question"]),
        "choices": options[:_OWN],
        "uncertain": options[_OWN:],
        "answer": LETTERS.index(record["answer"]),
    }
    return question if published.kind == "QA" else {**question, "context": str(record["context"])}


def _published_rows(published: Published, name: str, data_dir: str) -> list[dict[str, Any]]:
    """Return the published file of task `name` as rows of a question file."""
    path = file_of(UNCERTAINTY_DATASET, published.file, data_dir=data_dir, task=name)
    records = parse_json(read_text(path), source=path)
    if not isinstance(records, list) or len(records) <= max(_NEVER_ASKED):
        raise DataError(f"{path}: not a list of questions that holds the examples", allowed="10 questions or more")
    return _asked_rows(published, records, partial(_question, published), f"{path}, question")


def _asked_rows(
    published: Published, records: Sequence[R], question: Callable[[R], _QuestionRow], place: str
) -> list[dict[str, Any]]:
    """Return the records that are asked or serve as examples, as rows of a question file."""

    def head(number: int) -> dict[str, Any]:
        split = "dev" if number in published.examples else "test"
        return {"id": f"{number:05d}", "category": published.category, "kind": published.kind, "split": split}

    used = (pair for pair in enumerate(records) if pair[0] not in _NEVER_ASKED or pair[0] in published.examples)
    return hub_choice.checked_rows(used, head, question, place)


def _register_types(
    group: str,
    types: Mapping[str, Published],
    *,
    describe: Callable[[Published], tuple[str, str, str]],
    rows: Callable[[Published, str, str], list[dict[str, Any]]],
) -> None:
    """Register the five task types and their group.

    `types` are published files by task name. `describe` returns a type's source, its licence, and what defines its
    questions; `rows` its rows of a question file, given type, task name and the folder of data sets.
    """
    for name, published in types.items():
        source, licence, definition = describe(published)
        hub_choice.register_lettered(
            name,
            partial(rows, published),
            definition=definition,
            prompts=_PROMPTS,
            shots=len(published.examples),
            source=source,
            licence=licence,
            items="9,995 (with the options E and F in three prompts, and once without)",
        )
    TASKS.register(group)(
        NamedTask(
            source="the five tasks above",
            licence="see the tasks",
            items="all items of the tasks",
            shots="QA, RC and CI 5, DRS 3, DS 1",
            rule="as for each task; UAcc is the mean over prompts and tasks",
            members=tuple(types),
        )
    )


def _described(published: Published) -> tuple[str, str, str]:
    definition = f"{UNCERTAINTY_DATASET} {published} {_PROMPTS} {_NEVER_ASKED} lettered"
    return f"{UNCERTAINTY_DATASET}, {published.file}", "MIT (repository)", definition


_register_types("uncertainty", PUBLISHED_FILES, describe=_described, rows=_published_rows)


_DRAWN = 10_000
_OTHERS = {
    "RC": ("allenai/cosmos_qa", "refs/convert/parquet", hub_choice.cosmos_qa_question),
    "CI": ("Rowan/hellaswag", None, hub_choice.hellaswag_question),
}
_HALUEVAL = {"DRS": halueval_lettered.DIALOGUE, "DS": halueval_lettered.SUMMARIZATION}


def _drawn(kind: str, n: int, most: int, *parts: str) -> list[int]:
    return seeded(TaskSettings(), "uncertainty_built", kind, *parts).sample(range(n), min(n, most))


def _from_mmlu(task: str, data_dir: str) -> list[_QuestionRow]:
    drawn: list[_QuestionRow] = []
    for category, subjects in hub_choice.CATEGORIES.items():
        rows = [row for name in subjects for row in hub_choice.subject_rows(name, data_dir, task=task)]
        rows = [row for row in rows if row["split"] == "test"]
        drawn += [rows[i] for i in _drawn("QA", len(rows), _DRAWN // len(hub_choice.CATEGORIES), category)]
    mixed = [drawn[i] for i in _drawn("QA", len(drawn), len(drawn))]
    return [{name: row[name] for name in ("question", "choices", "answer")} for row in mixed]


def _from_splits(kind: str, task: str, data_dir: str) -> list[_QuestionRow]:
    dataset, revision, question = _OTHERS[kind]
    splits = [
        load_split(dataset, None, split, data_dir=data_dir, task=task, revision=revision)
        for split in ("train", "validation")
    ]
    first = len(splits[0])
    drawn = _drawn(kind, sum(map(len, splits)), _DRAWN)
    return [question(splits[0][i] if i < first else splits[1][i - first]) for i in drawn]


def _from_halueval(kind: str, task: str, data_dir: str) -> list[_QuestionRow]:
    part = _HALUEVAL[kind]
    records: Sequence[Any] = halueval_lettered.halueval_records(part, task, data_dir)
    return [halueval_lettered.question(part, records, i) for i in _drawn(kind, len(records), _DRAWN)]


_BUILDERS: dict[str, Callable[[str, str], list[_QuestionRow]]] = {
    "QA": _from_mmlu,
    **{kind: partial(_from_splits, kind) for kind in _OTHERS},
    **{kind: partial(_from_halueval, kind) for kind in _HALUEVAL},
}


def built_rows(published: Published, name: str, data_dir: str) -> list[dict[str, Any]]:
    """Return the task's questions as rows of a question file."""
    try:
        questions = _BUILDERS[published.kind](name, data_dir)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{name}: a record is not in the data set's layout ({error!r})") from error
    if len(questions) <= max(_NEVER_ASKED):
        raise DataError(f"{name}: the source holds too few questions", allowed="10 or more", got=len(questions))
    return _asked_rows(published, questions, dict, f"{name}, question")


_SOURCES = {
    "QA": ("cais/mmlu", "MIT"),
    "RC": ("allenai/cosmos_qa", "CC BY 4.0"),
    "CI": ("Rowan/hellaswag", "MIT"),
    "DRS": ("pminervini/HaluEval, dialogue", "Apache-2.0 (hub card)"),
    "DS": ("pminervini/HaluEval, summarization", "Apache-2.0 (hub card)"),
}
MEMBERS = {name.replace("uncertainty", "uncertainty_built"): file for name, file in PUBLISHED_FILES.items()}


def _built_described(published: Published) -> tuple[str, str, str]:
    source, licence = _SOURCES[published.kind]
    return source, licence, f"{source} {published} {_PROMPTS} {_DRAWN} built"


_register_types("uncertainty_built", MEMBERS, describe=_built_described, rows=built_rows)
