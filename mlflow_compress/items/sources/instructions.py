"""Instructions: FastChat's question files (MT-Bench, Vicuna-bench), Alpaca, and files of either schema."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeGuard

from mlflow_compress import demo
from mlflow_compress.config import EMBEDDED
from mlflow_compress.errors import DataError
from mlflow_compress.items.sources.conversations import Redaction, answers_of, smallest_digests
from mlflow_compress.items.sources.data_dir import load_split, reader_of
from mlflow_compress.items.sources.question_files import read_jsonl
from mlflow_compress.items.task import TaskSettings, limited
from mlflow_compress.records import Instruction as Instruction

logger = logging.getLogger(__name__)

_MOST_TURNS = 2
_REFERENCES = Path("reference_answer") / "gpt-4.jsonl"  # in the folder of FastChat's question.jsonl


def load_instructions(path: Path, settings: TaskSettings, *, name: str | None = None) -> list[Instruction]:
    """Return the instructions of a JSONL file: a seeded sample of `settings.limit` per category, or all.

    A line has MT-Bench's schema (`question_id`, `category`, one or two `turns`, `reference`) or Alpaca's
    (`instruction`, `input`, `output`; the line's number is its id). FastChat's reference answers are read if they are
    in the file's folder.
    """
    rows = read_jsonl(path)
    answers = _reference_answers(path.parent / _REFERENCES)
    instructions: dict[str, Instruction] = {}
    for row in rows:
        place = f"{path}, line {row['line']}: "
        made = _alpaca(place, row) if "instruction" in row else _mt_bench(place, row, answers)
        if made.item_id in instructions:
            raise DataError(f"{place}the question_id is used twice", got=made.item_id)
        instructions[made.item_id] = made
    return limited(name or path.stem, list(instructions.values()), settings, attrgetter("category"))


def _mt_bench(place: str, row: dict[str, Any], answers: dict[str, Sequence[str]]) -> Instruction:
    if "question_id" not in row or not isinstance(row.get("category"), str):
        raise DataError(f"{place}'question_id' and 'category' are needed")
    turns, item_id = row.get("turns"), str(row["question_id"])
    if not _are_texts(turns) or not 1 <= len(turns) <= _MOST_TURNS:
        raise DataError(f"{place}'turns' must be one or two texts that are not empty", got=turns)
    reference = answers.get(item_id) or row.get("reference") or []
    # MT-Bench's own file has empty references to questions that are graded without; `grading` refuses the others.
    if not isinstance(reference, list) or not all(isinstance(text, str) for text in reference):
        raise DataError(f"{place}'reference' must be a list of texts", got=reference)
    return Instruction(item_id=item_id, category=row["category"], turns=tuple(turns), reference=tuple(reference))


def _alpaca(place: str, row: dict[str, Any]) -> Instruction:
    instruction, context = row["instruction"], row.get("input") or ""
    if not isinstance(instruction, str) or not instruction.strip() or not isinstance(context, str):
        raise DataError(f"{place}'instruction' must be a text that is not empty, 'input' a text", got=instruction)
    said = f"{instruction}\n\n{context}" if context.strip() else instruction
    output = row.get("output")
    return Instruction(
        item_id=str(row.get("question_id", row["line"])),
        category=str(row.get("category", "alpaca")),
        turns=(said,),
        reference=(output,) if isinstance(output, str) and output.strip() else (),
    )


def _reference_answers(path: Path) -> dict[str, Sequence[str]]:
    """Return FastChat's reference answers by question id; empty if there is no such file."""
    if not path.is_file():
        return {}
    answers: dict[str, Sequence[str]] = {}
    for row in read_jsonl(path):
        choices = row.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        turns = first.get("turns") if isinstance(first, dict) else None
        if "question_id" not in row or turns is None or not _are_texts(turns):
            raise DataError(f"{path}, line {row['line']}: not a reference answer as FastChat writes them")
        answers[str(row["question_id"])] = turns
    return answers


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(text, str) and text.strip() for text in value)


def _fastchat(name: str) -> Callable[[TaskSettings], list[Instruction]]:
    def read(settings: TaskSettings) -> list[Instruction]:
        path = Path(settings.data_dir or "DATA_DIR") / name / "question.jsonl"
        if not path.is_file():
            raise DataError(
                f"The instructions {name!r} were not found",
                got=str(path),
                fix=f"Copy the folder fastchat/llm_judge/data/{name} of the FastChat repository to {path.parent}, "
                f"then give data_dir={path.parent.parent}",
            )
        return load_instructions(path, settings, name=name)

    return read


def _alpaca_set(settings: TaskSettings) -> list[Instruction]:
    rows = load_split("tatsu-lab/alpaca", None, "train", data_dir=settings.data_dir, task="instructions=alpaca")
    made = (_alpaca(f"tatsu-lab/alpaca, row {n}: ", {**row, "line": n}) for n, row in enumerate(rows))
    return limited("alpaca", list(made), settings, attrgetter("category"))


@dataclass(frozen=True)
class _PromptSet:
    """A public set of prompts that models should refuse, or only seem to have to."""

    dataset: str  # On the hub
    prompt: str  # Column of the prompts
    parts: tuple[tuple[str | None, str, str | None], ...]  # Configuration, split, and category; None for its column
    category: str = "category"  # Column of the categories

    def __call__(self, settings: TaskSettings) -> list[Instruction]:
        made = []
        for config, split, category in self.parts:
            rows = load_split(
                self.dataset, config, split, data_dir=settings.data_dir, task=f"instructions={self.dataset}"
            )
            for number, row in enumerate(rows, start=1):
                text, place = row.get(self.prompt), f"{self.dataset}, {split}, row {number}"
                named = category or row.get(self.category)
                if not isinstance(text, str) or not text.strip() or not isinstance(named, str):
                    raise DataError(f"{place}: {self.prompt!r} and {self.category!r} must be texts", got=row)
                name = "-".join(filter(None, (config, split, str(number))))
                made.append(Instruction(item_id=name, category=named, turns=(text,), reference=()))
        return limited(self.dataset, made, settings, attrgetter("category"))


INSTRUCTION_SETS: dict[str, Callable[[TaskSettings], list[Instruction]]] = {
    EMBEDDED: lambda settings: load_instructions(demo.DATA_DIR / "instructions.jsonl", settings),
    "mt_bench": _fastchat("mt_bench"),
    "vicuna_bench": _fastchat("vicuna_bench"),
    "alpaca": _alpaca_set,
    "xstest": _PromptSet("walledai/XSTest", "prompt", ((None, "test", None),), category="label"),
    "jbb": _PromptSet(
        "JailbreakBench/JBB-Behaviors",
        "Goal",
        (("behaviors", "harmful", "harmful"), ("behaviors", "benign", "benign")),
    ),
    "or_bench": _PromptSet(
        "bench-llm/or-bench",
        "prompt",
        (("or-bench-hard-1k", "train", "seems harmful"), ("or-bench-toxic", "train", "harmful")),
    ),
    "do_not_answer": _PromptSet("LibrAI/do-not-answer", "question", ((None, "train", None),), category="risk_area"),
}
"""Functions that read a set, by name."""


_LOGGED = "openai:"  # before a file of logged conversations


def is_logged(name_or_file: str) -> bool:
    """Return whether instructions are what people have asked an application."""
    return name_or_file.startswith(_LOGGED)


def fingerprint_of(instructions: Sequence[Instruction], named: str) -> list[object]:
    """Return what identifies instructions in a fingerprint, which is stored: digests alone of logged ones."""
    return [one.item_id if is_logged(named) else asdict(one) for one in instructions]


def _first_questions(file: Path, settings: TaskSettings) -> list[Instruction]:
    """Return the first question of each logged conversation with this system prompt, and as reference its answer."""
    firsts, others = [], 0
    for one in answers_of(file, Redaction.of(settings.redact)):
        *before, last = one.messages
        if last["role"] != "user" or any(message["role"] == "user" for message in before):
            continue
        if "\n".join(message["content"] for message in before) == settings.system_prompt:
            firsts.append(one)
        else:
            others += 1
    if not firsts:
        raise DataError(
            "No logged conversation begins with a question after the system prompt",
            allowed=f"system_prompt: {settings.system_prompt or 'none'}",
            got=f"{others} with another system prompt in {file}",
            fix="Give their system_prompt",
        )
    if others:
        logger.warning("%s: %d questions are asked; %d have another system prompt", file.name, len(firsts), others)
    asked: dict[str, Instruction] = {}
    for one in smallest_digests(firsts, settings.limit):
        question, category = one.messages[-1]["content"], one.category or "logged"
        asked.setdefault(
            question,
            Instruction(item_id=one.answer_id, category=category, turns=(question,), reference=(one.answer,)),
        )
    return list(asked.values())


def find_instructions(
    name_or_file: str, *, model: str, settings: TaskSettings, parameter: str = "instructions"
) -> list[Instruction]:
    """Return the instructions of a named set or a file, or ("openai:FILE") the first questions of logged conversations.

    "auto" is the demo's set, for embedded models only. `parameter` is the one that names them, for the messages.
    """
    if is_logged(name_or_file):
        return _first_questions(Path(name_or_file.removeprefix(_LOGGED)), settings)
    instead = "judge=false" if parameter == "instructions" else "leave these tasks out"
    fix = f"Give {parameter}=NAME or FILE, or {instead}"
    read = reader_of(parameter, name_or_file, INSTRUCTION_SETS, model=model, data_dir=settings.data_dir, fix=fix)
    return load_instructions(Path(name_or_file), settings) if read is None else read(settings)
