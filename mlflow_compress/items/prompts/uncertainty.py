"""The three prompts of the uncertainty benchmark: base, shared instruction, and one instruction per task type.

Source: smartyfh/LLM-Uncertainty-Bench (MIT), prompt.py (`shared_*_prompt`, `task_zero_prompt`, `task_few_prompt`) and
generate_logits.py (`format_*_prompt`).
"""

from __future__ import annotations

from collections.abc import Sequence

from mlflow_compress.items.prompt_style import PASSAGES, PROMPTS, PromptStyle, kind_of, lettered
from mlflow_compress.items.task import Row


def question(row: Row, options: Sequence[str]) -> str:
    """Return passage, question and options without stripping. The label of the passage depends on the kind."""
    label = PASSAGES[kind_of(row)]
    passage = [] if label is None else [f"{label}: {row['context']}"]
    return "\n".join([*passage, f"Question: {row['question']}", "Choices:", *lettered(options), "Answer:"])


def examples_block(examples: Sequence[str]) -> str:
    """Return the examples without blank lines between them."""
    return "".join(f"{example}\n" for example in examples)


def header(category: str, kind: str, examples: Sequence[str]) -> str:
    """Return the examples, without an instruction."""
    return examples_block(examples)


PROMPTS.register("base")(PromptStyle(question=question, header=header))


ZERO_SHOT = (
    "The following is a multiple-choice question with six potential answers. Only one of these options is correct. "
    "Please make your best effort and select the correct answer. You only need to output the option.\n\n"
)
FEW_SHOT = (
    "Below are some examples of multiple-choice questions with six potential answers. "
    "For each question, only one option is correct.\n\n"
)
NOW = (
    "\nNow make your best effort and select the correct answer for the following question. "
    "You only need to output the option.\n\n"
)


def shared_header(category: str, kind: str, examples: Sequence[str]) -> str:
    """Return the instruction; with examples, they and a second instruction follow."""
    return f"{FEW_SHOT}{examples_block(examples)}{NOW}" if examples else ZERO_SHOT


PROMPTS.register("shared")(PromptStyle(question=question, header=shared_header, n_options=6))


ABOUT = {
    "QA": "question answering",
    "CI": "commonsense natural language inference",
    "RC": "reading comprehension",
    "DRS": "dialogue response selection",
    "DS": "document summarization",
}
TASK_ZERO_SHOT = {
    "QA": "You should answer the question based on your world knowledge and problem solving ability.",
    "CI": "You are given a context and you should choose the most likely follow-up.",
    "RC": "You should answer the question based on the given context and you can use commonsense reasoning when "
    "necessary.",
    "DRS": "You are given a dialogue history and you should select the best and correct response without "
    "hallucination and non-factual information.",
    "DS": "You are given a document and you should select the best and correct summary without hallucination and "
    "non-factual information.",
}
TASK_FEW_SHOT = {
    "QA": "Each question should be answered based on your world knowledge and problem solving ability.",
    "CI": "For each question, there is a given context and the answer is the option that most likely follows the "
    "context.",
    "RC": "Each question should be answered based on the given context and commonsense reasoning when necessary.",
    "DRS": "For each question, the answer is the option that represents the most suitable response for the given "
    "dialogue history, without hallucination and non-factual information.",
    "DS": "For each question, the answer is the option that accurately summarizes the given document without "
    "hallucination and non-factual information.",
}


def task_header(category: str, kind: str, examples: Sequence[str]) -> str:
    """Return the instruction of the task type; with examples, they and a second instruction follow."""
    if examples:
        below = f"Below are some examples of multiple-choice questions about {ABOUT[kind]}. {TASK_FEW_SHOT[kind]}\n\n"
        return f"{below}{examples_block(examples)}{NOW}"
    return (
        f"The following is a multiple-choice question about {ABOUT[kind]}. {TASK_ZERO_SHOT[kind]} "
        "You only need to output the option.\n\n"
    )


PROMPTS.register("task")(PromptStyle(question=question, header=task_header))
