"""Hesitation markers: the words with which a thought stops, doubts, checks or turns, in several languages."""

import re
from functools import cache
from pathlib import Path

import yaml  # type: ignore[import-untyped]

MARKERS = Path(__file__).with_name("hesitation_markers.yaml")
"""The markers by language; the file says how it is read."""

_WITHOUT_SPACES = ("zh", "ja")


@cache
def _pattern() -> re.Pattern[str]:
    spaced: list[str] = []
    unspaced: list[str] = []
    for language, kinds in yaml.safe_load(MARKERS.read_text(encoding="utf-8")).items():
        chosen = unspaced if language in _WITHOUT_SPACES else spaced
        chosen += [re.escape(marker) for markers in kinds.values() for marker in markers]
    # The longest first, so that "but wait" is one marker.
    words, characters = ("|".join(sorted(set(each), key=lambda m: (-len(m), m))) for each in (spaced, unspaced))
    return re.compile(rf"(?<!\w)(?:{words})(?!\w)|{characters}", re.IGNORECASE)


def marker_starts(text: str) -> list[int]:
    """Return the character at which each marker begins; markers do not overlap."""
    return [found.start() for found in _pattern().finditer(text.replace("\u2019", "'"))]
