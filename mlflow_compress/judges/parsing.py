"""Reading a rating out of a judge's text. Pure."""

from __future__ import annotations

import re

LOW, HIGH = 1.0, 10.0

# Two brackets on each side; spaces and a "/10" inside are tolerated. One bracket is a citation such as [1], no rating.
_RATING = re.compile(r"(?<!\[)\[\[\s*([0-9]+(?:\.[0-9]*)?)\s*(?:/\s*10(?:\.0*)?)?\s*\]\](?!\])")


def parse_rating(text: str) -> float | None:
    """Return the first ``[[x]]`` of a judgment, or None where there is none, or it is outside 1..10.

    Decimals such as ``[[7.5]]`` are ratings, as in FastChat. Three deviations from FastChat, whose parser loses or
    invents scores there: ``[[ 8 ]]`` and ``[[10/10]]`` are read, a bare ``[1]`` is not taken as a score, and what
    cannot be read is None, never -1. The first rating decides: when it is out of range, no later one replaces it.

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
