"""What a prompt style of lettered questions is, and the registry of styles; each is one file of `prompts`."""

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
    """How lettered questions are shown.

    Attributes
    ----------
    question : callable (row, options) -> str
        A question with its passage and lettered options, up to and including "Answer:".
    header : callable (category, kind, examples) -> str
        What stands before it: instructions, and the examples, which are questions with their answers ("...Answer: B").
    n_options : int, optional
        The only number of options that the wording is true of.
    """

    question: Callable[[Row, Sequence[str]], str]
    header: Callable[[str, str, Sequence[str]], str]
    n_options: int | None = None


PROMPTS: Registry[PromptStyle] = Registry("prompt style", "mlflow_compress.items.prompts")


def styles_of(asked: str) -> dict[str, PromptStyle]:
    """Return the styles that `-P prompt_style=` names, in order; 'auto' is the default one.

    Raises
    ------
    ConfigError
        When a name is unknown or given twice.
    """
    names = [DEFAULT] if asked == "auto" else [name.strip() for name in asked.split(",")]
    if len(set(names)) < len(names):
        raise ConfigError("Parameter 'prompt_style' names a style twice", got=asked)
    return {name: PROMPTS.get(name) for name in names}


def kind_of(row: Row) -> str:
    """Return a row's task type: its "kind", else RC where it has a passage, and QA where it has none."""
    return str(row.get("kind") or ("RC" if row.get("context") else "QA"))


def lettered(options: Sequence[str]) -> list[str]:
    """Return one line an option, with its letter."""
    return [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False)]
