"""The common form of the original MMLU prompt: one space before the subject, and the question stripped.

The original script's own text differs in these two points, see `original`.
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
