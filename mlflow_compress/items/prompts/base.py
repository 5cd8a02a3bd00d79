"""The uncertainty benchmark's base prompt: few-shot examples and question, without instructions.

Source: smartyfh/LLM-Uncertainty-Bench (MIT), generate_logits.py, `format_example` and `format_base_prompt`.
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
