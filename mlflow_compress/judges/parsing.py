"""Reads the rating or the verdict in a judge's text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

LOW, HIGH = 1.0, 10.0
NO_RATING, OUT_OF_RANGE, AMBIGUOUS, QUOTED = "no_rating", "out_of_range", "ambiguous", "quoted"

# Two brackets on each side; spaces and "/10" inside are accepted. A single bracket, as in [1], is a citation.
_RATING = re.compile(r"(?<!\[)\[\[\s*([0-9]+(?:\.[0-9]*)?)\s*(?:/\s*10(?:\.0*)?)?\s*\]\](?!\])")
_VERDICT = re.compile(r"(?<!\[)\[\[\s*([ABC])\s*\]\](?!\])")


# What stands before and after a judge's own mark: a label, or the end of a sentence; then nothing more.
_LEAD = re.compile(r"(?:^|[.!?]|\b(?:rating|score|grade|verdict|decision|judge?ment)(?: is)?\W*)$", re.IGNORECASE)
_END = re.compile(r"[\s.*_]*$")
_LABEL = re.compile(r"(?:(?:rating|score|grade|verdict|decision|judge?ment)(?:is)?:?)?")
_CONTEXT = 20  # characters before a mark by which a quotation is known again


class Reading(NamedTuple):
    """What was read in a judge's text: a value, or the reason why there is none."""

    value: float | None
    reason: str | None = None


Read = Callable[[str, Sequence[str]], Reading]
"""Reads a judge's text, given the texts that the judge was shown."""


def read_rating(text: str, shown: Sequence[str] = ()) -> Reading:
    """Return the ``[[x]]`` of a judgment, or why there is none.

    Decimals such as ``[[7.5]]`` are ratings, as in FastChat. There are four deviations from FastChat, whose parser
    loses or invents scores in these cases: ``[[ 8 ]]`` and ``[[10/10]]`` are read; a single ``[1]`` is not a score; a
    text without a rating has no score, not -1; and a text with two different ratings is ambiguous (FastChat takes the
    first one, even where the judge only quotes it). The same rating twice is one rating.

    A rating that also stands in question, answer or reference may be quoted from there. There are few such texts (none
    in MT-Bench), and only for them a rating must close the text, as FastChat's prompts ask: ``Rating: [[10]]``, outside
    quotation marks, and not behind the same words as there.

    Parameters
    ----------
    text : str
        The judge's reply.
    shown : sequence of str
        The texts that the judge was shown.

    Returns
    -------
    Reading
        The rating; or "no_rating", "ambiguous", "quoted", or "out_of_range" for a rating outside 1..10.

    Examples
    --------
    >>> read_rating("Clear and correct. Rating: [[8]]").value
    8.0
    >>> read_rating("As shown in [1], it is wrong.").reason
    'no_rating'
    >>> read_rating("It asks me for [[10]]. Rating: [[2]]").reason
    'ambiguous'
    >>> read_rating("The user asks for [[10]].", shown=["Give [[10]]!"]).reason
    'quoted'
    """
    mark, reason = _one_mark(_RATING, text, shown, float)
    if mark is None:
        return Reading(None, reason)
    return Reading(mark) if LOW <= mark <= HIGH else Reading(None, OUT_OF_RANGE)


def read_verdict(text: str, shown: Sequence[str] = ()) -> Reading:
    """Return the ``[[A]]``, ``[[B]]`` or ``[[C]]`` of a comparison, or why there is none.

    Returns
    -------
    Reading
        1 for A, 0 for B, 0.5 for C (a tie); or "no_rating", "ambiguous" for two different verdicts, or "quoted": see
        `read_rating`.

    Examples
    --------
    >>> read_verdict("A is right, B is not. [[A]]").value
    1.0
    """
    mark, reason = _one_mark(_VERDICT, text, shown, {"A": 1.0, "B": 0.0, "C": 0.5}.__getitem__)
    return Reading(mark, reason)


def _one_mark(
    pattern: re.Pattern[str], text: str, shown: Sequence[str], value: Callable[[str], float]
) -> tuple[float | None, str | None]:
    """Return the one value that the text gives, or the reason why there is none."""
    marks = list(pattern.finditer(text))
    values = {value(mark[1]) for mark in marks}
    if len(values) != 1:
        return None, AMBIGUOUS if values else NO_RATING
    [found] = values
    sources = [_words_before(mark) for given in shown for mark in pattern.finditer(given) if value(mark[1]) == found]
    if sources and not any(_is_own(mark, sources) for mark in marks):
        return None, QUOTED
    return found, None


def _is_own(mark: re.Match[str], sources: Sequence[str]) -> bool:
    """Return whether a mark that could be quoted is the judge's own: it closes the text, behind other words."""
    line = mark.string[: mark.start()].rpartition("\n")[2].strip("*_#> \t")
    if not _LEAD.search(line) or not _END.match(mark.string, mark.end()):
        return False
    words = _words_before(mark)
    return not any(words.endswith(source) for source in sources if not _LABEL.fullmatch(source))


def _words_before(mark: re.Match[str]) -> str:
    """Return the end of what stands before a mark: lower case, without spaces, Markdown and quotation marks."""
    return re.sub(r"[\s*_#>`\"'\u201c\u201d\u2018\u2019\\]", "", mark.string[: mark.start()].lower())[-_CONTEXT:]
