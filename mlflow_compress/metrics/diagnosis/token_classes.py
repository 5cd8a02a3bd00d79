"""Classes of tokens by their text: where words begin, digits, punctuation, rare tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mlflow_compress.metrics.stats.arrays import Bool

FIRST, INSIDE, DIGITS, PUNCTUATION, SPACE, OTHER = (
    "first token of a word",
    "inside a word",
    "digits",
    "punctuation",
    "white space",
    "other",
)
RARE = "rare tokens"
RARE_SHARE = 0.1


def token_class(text: str, before: str) -> str:
    """Return the class of a token. Every token has exactly one.

    - "digits": its text has a digit.
    - "first token of a word": it has a letter, and the character before its first letter is no letter (a space or a
      sign, in the token or at the end of the text before it).
    - "inside a word": it begins with a letter that goes on with the word before it.
    - "punctuation": it has neither letter nor digit, but a character that is no white space.
    - "white space": it has nothing else.
    - "other": it has no text of its own (a special token, a part of a character).

    Parameters
    ----------
    text : str
        The token's own text, with its leading space.
    before : str
        What comes before it, of which the last character counts.

    Examples
    --------
    >>> [token_class(text, before) for text, before in [(" mill", "the"), ("er", " mill"), (" 12", "in"), (",", "er")]]
    ['first token of a word', 'inside a word', 'digits', 'punctuation']
    """
    if not text or "\N{REPLACEMENT CHARACTER}" in text:
        return OTHER
    if any(character.isdigit() for character in text):
        return DIGITS
    first = next((place for place, character in enumerate(text) if character.isalpha()), None)
    if first is not None:
        previous = text[first - 1] if first else before[-1:]
        return INSIDE if previous.isalpha() else FIRST
    return PUNCTUATION if text.strip() else SPACE


def rare_tokens(tokens: npt.NDArray[np.int64], share: float = RARE_SHARE) -> Bool:
    """Return which tokens are rare in this text itself, shape (n,).

    The distinct tokens are ordered by how often they occur. Rare are those that occur at most k times, with the largest
    k for which they are together at most `share` of the text; at least those that occur once.

    Examples
    --------
    >>> rare_tokens(np.array([7] * 15 + [8] * 3 + [9, 5])).sum()
    2
    """
    _, place, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    most = 1
    for k in np.unique(counts):
        if counts[counts <= k].sum() <= share * len(tokens):
            most = max(most, int(k))
    return np.asarray((counts <= most)[place])


def class_rows(texts: Sequence[str], before: Sequence[str], tokens: npt.NDArray[np.int64]) -> dict[str, Bool]:
    """Return which tokens are in each class that occurs. "rare tokens" overlaps with the others."""
    found = np.asarray([token_class(text, previous) for text, previous in zip(texts, before, strict=True)])
    names = [name for name in (FIRST, INSIDE, DIGITS, PUNCTUATION, SPACE, OTHER) if (found == name).any()]
    rows = {name: found == name for name in names}
    rare = rare_tokens(tokens)
    return {**rows, RARE: rare} if rare.any() else rows
