"""The prompts of MMLU: those of lm-evaluation-harness (harness, hendrycks) and of the original script (original).

Source of `original`: hendrycks/test (MIT), evaluate.py, `format_subject`, `format_example` and `gen_prompt`: two spaces
before the subject, and nothing stripped. A passage, which MMLU does not have, is on a line before the question.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlflow_compress.items.prompt_style import PROMPTS, PromptStyle, lettered
from mlflow_compress.items.task import Row


def question(row: Row, options: Sequence[str]) -> str:
    """Return passage, question and options, each on a line of its own."""
    passage = [row["context"].strip()] if row.get("context") else []
    return "\n".join([*passage, row["question"].strip(), *lettered(options), "Answer:"])


def header(category: str, kind: str, examples: Sequence[str]) -> str:
    """Return the instruction line and the examples, each followed by a blank line."""
    instruction = f"The following are multiple choice questions (with answers) about {category.replace('_', ' ')}."
    return "\n\n".join([instruction, *examples]) + "\n\n"


STYLE = PROMPTS.register("hendrycks")(PromptStyle(question=question, header=header))


PROMPTS.register("harness")(STYLE)


def original_question(row: Row, options: Sequence[str]) -> str:
    """Return passage, question and options unchanged, each on a line of its own."""
    passage = [row["context"]] if row.get("context") else []
    return "\n".join([*passage, row["question"], *lettered(options), "Answer:"])


def original_header(category: str, kind: str, examples: Sequence[str]) -> str:
    """Return the instruction line and the examples. The script puts a space before every word of the subject."""
    subject = "".join(f" {word}" for word in category.split("_"))
    instruction = f"The following are multiple choice questions (with answers) about {subject}."
    return "\n\n".join([instruction, *examples]) + "\n\n"


PROMPTS.register("original")(PromptStyle(question=original_question, header=original_header))
