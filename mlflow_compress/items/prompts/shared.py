"""The uncertainty benchmark's shared-instruction prompt: one wording for all task types, for six options.

Source: smartyfh/LLM-Uncertainty-Bench (MIT), prompt.py (`shared_zero_prompt`, `shared_few_prompt`) and
generate_logits.py, `format_shared_prompt`.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlflow_compress.items.prompt_style import PROMPTS, PromptStyle
from mlflow_compress.items.prompts.base import examples_block, question

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


def header(category: str, kind: str, examples: Sequence[str]) -> str:
    """Return the instruction; with examples, they and a second instruction follow."""
    return f"{FEW_SHOT}{examples_block(examples)}{NOW}" if examples else ZERO_SHOT


PROMPTS.register("shared")(PromptStyle(question=question, header=header, n_options=6))
