"""Finds the reasoning in an answer: the tokens between <think> and </think>."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

OPEN, CLOSE = "<think>", "</think>"


def reasoning_span(tokenizer: Any, prompt: str, tokens: Sequence[int]) -> tuple[int, int] | None:
    """Return where the reasoning of an answer begins and ends: ``tokens[begin:end]``. None where there is none.

    It begins behind the opening tag, and ends with the closing tag; without a closing tag, with the answer. Some chat
    templates write the opening tag at the end of the prompt. Then the reasoning begins with the answer.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    prompt : str
        The rendered prompt.
    tokens : sequence of int
        The answer.
    """

    def first(tag: str) -> int | None:
        """Return the number of tokens up to and with the first tag; None where there is no such tag."""
        if tag not in tokenizer.decode(tokens, skip_special_tokens=False):
            return None
        return bisect_left(
            range(len(tokens) + 1), True, key=lambda n: tag in tokenizer.decode(tokens[:n], skip_special_tokens=False)
        )

    opened, closed = first(OPEN), first(CLOSE)
    if opened is not None:
        begin = opened
    elif prompt.rstrip().endswith(OPEN) or closed is not None:
        begin = 0
    else:
        return None
    end = len(tokens) if closed is None else closed
    return (begin, end) if begin < end else None
