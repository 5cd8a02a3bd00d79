"""Reads the rating or the verdict in a judge's text."""

from __future__ import annotations

import re
from typing import NamedTuple

LOW, HIGH = 1.0, 10.0
NO_RATING, OUT_OF_RANGE, AMBIGUOUS = "no_rating", "out_of_range", "ambiguous"

# Two brackets on each side; spaces and "/10" inside are accepted. A single bracket, as in [1], is a citation.
_RATING = re.compile(r"(?<!\[)\[\[\s*([0-9]+(?:\.[0-9]*)?)\s*(?:/\s*10(?:\.0*)?)?\s*\]\](?!\])")
_VERDICT = re.compile(r"(?<!\[)\[\[\s*([ABC])\s*\]\](?!\])")


class Reading(NamedTuple):
    """What was read in a judge's text: a value, or the reason why there is none."""

    value: float | None
    reason: str | None = None


def read_rating(text: str) -> Reading:
    """Return the ``[[x]]`` of a judgment, or why there is none.

    Decimals such as ``[[7.5]]`` are ratings, as in FastChat. There are four deviations from FastChat, whose parser
    loses or invents scores in these cases: ``[[ 8 ]]`` and ``[[10/10]]`` are read; a single ``[1]`` is not a score; a
    text without a rating has no score, not -1; and a text with two different ratings is ambiguous (FastChat takes the
    first one, even where the judge only quotes it). The same rating twice is one rating.

    Returns
    -------
    Reading
        The rating; or "no_rating", "ambiguous", or "out_of_range" for a rating outside 1..10.

    Examples
    --------
    >>> read_rating("Clear and correct. Rating: [[8]]").value
    8.0
    >>> read_rating("As shown in [1], it is wrong.").reason
    'no_rating'
    >>> read_rating("It asks me for [[10]]. Rating: [[2]]").reason
    'ambiguous'
    """
    found = {float(number) for number in _RATING.findall(text)}
    if len(found) != 1:
        return Reading(None, AMBIGUOUS if found else NO_RATING)
    [rating] = found
    return Reading(rating) if LOW <= rating <= HIGH else Reading(None, OUT_OF_RANGE)


def read_verdict(text: str) -> Reading:
    """Return the ``[[A]]``, ``[[B]]`` or ``[[C]]`` of a comparison, or why there is none.

    Returns
    -------
    Reading
        1 for A, 0 for B, 0.5 for C (a tie); or "no_rating", or "ambiguous" for two different verdicts.

    Examples
    --------
    >>> read_verdict("A is right, B is not. [[A]]").value
    1.0
    """
    found = set(_VERDICT.findall(text))
    if len(found) != 1:
        return Reading(None, AMBIGUOUS if found else NO_RATING)
    return Reading({"A": 1.0, "B": 0.0, "C": 0.5}[found.pop()])
