"""Where two texts part: the beginning that they share, and the first word of each that differs."""

from __future__ import annotations

import re
from dataclasses import dataclass

_WORD = re.compile(r"\s*\S{1,40}|\s+")
_LONGEST_WORD = 20  # characters by which the mark may begin before the difference
_SHARED_SHOWN, _REST_SHOWN = 300, 1200  # characters of a text that are not folded


@dataclass(frozen=True)
class MarkedText:
    """A text in five parts, which together are the text.

    Attributes
    ----------
    folded_start, shared : str
        What both texts begin with; a long beginning is folded but for its end.
    mark : str
        The first word that differs; empty where the text ends there, or where both are the same.
    rest, folded_rest : str
        What follows; the end of a long text is folded.
    ends : bool
        Whether this text ends where the other one goes on.
    """

    folded_start: str
    shared: str
    mark: str
    rest: str
    folded_rest: str
    ends: bool = False


def first_difference(one: str, other: str) -> int | None:
    """Return the index of the first character that differs; None if the texts are the same.

    Examples
    --------
    >>> first_difference("a dog", "a cat")
    2
    """
    if one == other:
        return None
    both = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(both) if left != right), min(len(one), len(other)))


def marked(one: str, other: str) -> tuple[MarkedText, MarkedText]:
    """Return both texts with the first word that differs marked.

    Examples
    --------
    >>> [text.mark for text in marked("It is a good dog.", "It is a goat.")]
    ['good', 'goat.']
    """
    at = first_difference(one, other)
    if at is None:
        same = MarkedText("", one[:_REST_SHOWN], "", "", one[_REST_SHOWN:])
        return same, same
    start = at
    if not (one[at:] + other[at:])[0].isspace() or (one[at:] and other[at:]):  # not where one text ends with the word
        while start > 0 and at - start < _LONGEST_WORD and not one[start - 1].isspace():
            start -= 1
    return _parts(one, start), _parts(other, start)


def _parts(text: str, start: int) -> MarkedText:
    found = _WORD.match(text, start)
    end = found.end() if found else start
    fold = start - _SHARED_SHOWN if start > 2 * _SHARED_SHOWN else 0
    more = end + _REST_SHOWN if len(text) > end + 2 * _REST_SHOWN else len(text)
    parts = text[:fold], text[fold:start], text[start:end], text[end:more], text[more:]
    return MarkedText(*parts, ends=start == len(text))
