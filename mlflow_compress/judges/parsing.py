"""Reads the rating in a judge's text."""

from __future__ import annotations

import re

LOW, HIGH = 1.0, 10.0

# Two brackets on each side; spaces and "/10" inside are accepted. A single bracket, as in [1], is a citation.
_RATING = re.compile(r"(?<!\[)\[\[\s*([0-9]+(?:\.[0-9]*)?)\s*(?:/\s*10(?:\.0*)?)?\s*\]\](?!\])")


def parse_rating(text: str) -> float | None:
    """Return the first ``[[x]]`` of a judgment, or None if there is none or it is outside 1..10.

    Decimals such as ``[[7.5]]`` are ratings, as in FastChat. There are three deviations from FastChat, whose parser
    loses or invents scores in these cases: ``[[ 8 ]]`` and ``[[10/10]]`` are read; a single ``[1]`` is not a score; and
    a text without a rating gives None, not -1. The first rating counts. If it is out of range, later ones are not read.

    Examples
    --------
    >>> parse_rating("Clear and correct. Rating: [[8]]")
    8.0
    >>> parse_rating("As shown in [1], it is wrong.") is None
    True
    """
    found = _RATING.search(text)
    if found is None:
        return None
    rating = float(found.group(1))
    return rating if LOW <= rating <= HIGH else None
