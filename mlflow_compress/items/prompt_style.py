"""The prompt styles of lettered questions.

Sources: `hendrycks` and `harness` are the prompts of MMLU in lm-evaluation-harness. `original` is hendrycks/test (MIT),
evaluate.py, `format_subject`, `format_example` and `gen_prompt`: two spaces before the subject, and nothing stripped;
a passage, which MMLU does not have, is on a line before the question. `base`, `shared` and `task` are
smartyfh/LLM-Uncertainty-Bench (MIT), prompt.py (`shared_*_prompt`, `task_zero_prompt`, `task_few_prompt`) and
generate_logits.py (`format_*_prompt`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from mlflow_compress.errors import ConfigError
from mlflow_compress.items.task import Row

LETTERS = ascii_uppercase
PASSAGES = {"QA": None, "RC": "Context", "CI": "Context", "DRS": "Dialogue", "DS": "Document"}
"""The uncertainty benchmark's task types, and what each calls its passage (QA has none)."""

DEFAULT = "hendrycks"


@dataclass(frozen=True, kw_only=True)
class PromptStyle:
    """How lettered questions are shown."""

    # A question with its passage and lettered options, up to and including "Answer:"
    question: Callable[[Row, Sequence[str]], str]
    # The text before it: instructions and few-shot examples, which are questions with answers ("...Answer: B")
    header: Callable[[str, str, Sequence[str]], str]
    n_options: int | None = None  # The number of options that the wording states; None if it states none


def kind_of(row: Row) -> str:
    """Return a row's task type: its "kind" if given, otherwise RC with a passage and QA without."""
    return str(row.get("kind") or ("RC" if row.get("context") else "QA"))


def _lettered(options: Sequence[str]) -> list[str]:
    """Return one line per option, with its letter."""
    return [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False)]


def _plain_question(row: Row, options: Sequence[str]) -> str:
    passage = [row["context"]] if row.get("context") else []
    return "\n".join([*passage, row["question"], *_lettered(options), "Answer:"])


def _stripped_question(row: Row, options: Sequence[str]) -> str:
    texts = {name: row[name].strip() for name in ("context", "question") if row.get(name)}
    return _plain_question({**row, **texts}, options)


def _subject_header(subject: str, examples: Sequence[str]) -> str:
    instruction = f"The following are multiple choice questions (with answers) about {subject}."
    return "\n\n".join([instruction, *examples]) + "\n\n"


def _labelled_question(row: Row, options: Sequence[str]) -> str:
    """Return passage, question and options without stripping. The label of the passage depends on the kind."""
    label = PASSAGES[kind_of(row)]
    passage = [] if label is None else [f"{label}: {row['context']}"]
    return "\n".join([*passage, f"Question: {row['question']}", "Choices:", *_lettered(options), "Answer:"])


def _block(examples: Sequence[str]) -> str:
    return "".join(f"{example}\n" for example in examples)


_ZERO_SHOT = (
    "The following is a multiple-choice question with six potential answers. Only one of these options is correct. "
    "Please make your best effort and select the correct answer. You only need to output the option.\n\n"
)
_FEW_SHOT = (
    "Below are some examples of multiple-choice questions with six potential answers. "
    "For each question, only one option is correct.\n\n"
)
_NOW = (
    "\nNow make your best effort and select the correct answer for the following question. "
    "You only need to output the option.\n\n"
)


ABOUT = {
    "QA": "question answering",
    "CI": "commonsense natural language inference",
    "RC": "reading comprehension",
    "DRS": "dialogue response selection",
    "DS": "document summarization",
}
_TASK_ZERO_SHOT = {
    "QA": "You should answer the question based on your world knowledge and problem solving ability.",
    "CI": "You are given a context and you should choose the most likely follow-up.",
    "RC": "You should answer the question based on the given context and you can use commonsense reasoning when "
    "necessary.",
    "DRS": "You are given a dialogue history and you should select the best and correct response without "
    "hallucination and non-factual information.",
    "DS": "You are given a document and you should select the best and correct summary without hallucination and "
    "non-factual information.",
}
_TASK_FEW_SHOT = {
    "QA": "Each question should be answered based on your world knowledge and problem solving ability.",
    "CI": "For each question, there is a given context and the answer is the option that most likely follows the "
    "context.",
    "RC": "Each question should be answered based on the given context and commonsense reasoning when necessary.",
    "DRS": "For each question, the answer is the option that represents the most suitable response for the given "
    "dialogue history, without hallucination and non-factual information.",
    "DS": "For each question, the answer is the option that accurately summarizes the given document without "
    "hallucination and non-factual information.",
}


def _task_header(category: str, kind: str, examples: Sequence[str]) -> str:
    if examples:
        below = f"Below are some examples of multiple-choice questions about {ABOUT[kind]}. {_TASK_FEW_SHOT[kind]}\n\n"
        return f"{below}{_block(examples)}{_NOW}"
    return (
        f"The following is a multiple-choice question about {ABOUT[kind]}. {_TASK_ZERO_SHOT[kind]} "
        "You only need to output the option.\n\n"
    )


_HENDRYCKS = PromptStyle(
    question=_stripped_question,
    header=lambda category, kind, examples: _subject_header(category.replace("_", " "), examples),
)
PROMPTS = {
    "hendrycks": _HENDRYCKS,
    "harness": _HENDRYCKS,
    "original": PromptStyle(
        question=_plain_question,
        # The script puts a space before every word of the subject.
        header=lambda category, kind, examples: _subject_header(" " + category.replace("_", " "), examples),
    ),
    "base": PromptStyle(question=_labelled_question, header=lambda category, kind, examples: _block(examples)),
    "shared": PromptStyle(
        question=_labelled_question,
        header=lambda category, kind, examples: f"{_FEW_SHOT}{_block(examples)}{_NOW}" if examples else _ZERO_SHOT,
        n_options=6,
    ),
    "task": PromptStyle(question=_labelled_question, header=_task_header),
}


def styles_of(text: str) -> dict[str, PromptStyle]:
    """Return the styles that `-P prompt_style=` names, in order; "auto" is the default style."""
    names = [DEFAULT] if text == "auto" else [name.strip() for name in text.split(",")]
    if len(set(names)) < len(names):
        raise ConfigError("Parameter 'prompt_style' names a style twice", got=text)
    for unknown in (name for name in names if name not in PROMPTS):
        raise ConfigError("Unknown prompt style", allowed=sorted(PROMPTS), got=unknown)
    return {name: PROMPTS[name] for name in names}
