"""The uncertainty benchmark's task-specific prompt: one instruction per task type.

Source: smartyfh/LLM-Uncertainty-Bench (MIT), prompt.py (`task_zero_prompt`, `task_few_prompt`) and generate_logits.py,
`format_task_prompt`.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlflow_compress.items.prompt_style import PROMPTS, PromptStyle
from mlflow_compress.items.prompts.base import examples_block, question
from mlflow_compress.items.prompts.shared import NOW

ABOUT = {
    "QA": "question answering",
    "CI": "commonsense natural language inference",
    "RC": "reading comprehension",
    "DRS": "dialogue response selection",
    "DS": "document summarization",
}
ZERO_SHOT = {
    "QA": "You should answer the question based on your world knowledge and problem solving ability.",
    "CI": "You are given a context and you should choose the most likely follow-up.",
    "RC": "You should answer the question based on the given context and you can use commonsense reasoning when "
    "necessary.",
    "DRS": "You are given a dialogue history and you should select the best and correct response without "
    "hallucination and non-factual information.",
    "DS": "You are given a document and you should select the best and correct summary without hallucination and "
    "non-factual information.",
}
FEW_SHOT = {
    "QA": "Each question should be answered based on your world knowledge and problem solving ability.",
    "CI": "For each question, there is a given context and the answer is the option that most likely follows the "
    "context.",
    "RC": "Each question should be answered based on the given context and commonsense reasoning when necessary.",
    "DRS": "For each question, the answer is the option that represents the most suitable response for the given "
    "dialogue history, without hallucination and non-factual information.",
    "DS": "For each question, the answer is the option that accurately summarizes the given document without "
    "hallucination and non-factual information.",
}


def header(category: str, kind: str, examples: Sequence[str]) -> str:
    """Return the instruction of the task type; with examples, they and a second instruction follow."""
    if examples:
        below = f"Below are some examples of multiple-choice questions about {ABOUT[kind]}. {FEW_SHOT[kind]}\n\n"
        return f"{below}{examples_block(examples)}{NOW}"
    return (
        f"The following is a multiple-choice question about {ABOUT[kind]}. {ZERO_SHOT[kind]} "
        "You only need to output the option.\n\n"
    )


PROMPTS.register("task")(PromptStyle(question=question, header=header))
