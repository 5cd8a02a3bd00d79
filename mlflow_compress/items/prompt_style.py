"""Prompt styles of lettered questions, and their registry. Each style is one file of `prompts`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from mlflow_compress.errors import ConfigError
from mlflow_compress.items.task import Row
from mlflow_compress.registry import Registry

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


PROMPTS: Registry[PromptStyle] = Registry("prompt style", "mlflow_compress.items.prompts", of=PromptStyle)


def styles_of(asked: str) -> dict[str, PromptStyle]:
    """Return the styles that `-P prompt_style=` names, in order; "auto" is the default style.

    Raises `ConfigError`: a name is unknown or given twice.
    """
    names = [DEFAULT] if asked == "auto" else [name.strip() for name in asked.split(",")]
    if len(set(names)) < len(names):
        raise ConfigError("Parameter 'prompt_style' names a style twice", got=asked)
    return {name: PROMPTS.get(name) for name in names}


def kind_of(row: Row) -> str:
    """Return a row's task type: its "kind" if given, otherwise RC with a passage and QA without."""
    return str(row.get("kind") or ("RC" if row.get("context") else "QA"))


def lettered(options: Sequence[str]) -> list[str]:
    """Return one line per option, with its letter."""
    return [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False)]
