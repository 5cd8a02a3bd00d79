"""The sheet that raters get, as a page and as a CSV file: two answers per row, and nothing that says whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from mlflow_compress.reporting.tables import TEMPLATES, csv_text, policy_hash

CHOICES = ("A", "tie", "B", "both bad")
"""What a rater may choose."""
COLUMNS = ("id", "category", "question", "answer_a", "answer_b", "choice")
_SCRIPT = Path(__file__).parent / "templates" / "rating_page.js"


@dataclass(frozen=True, kw_only=True)
class RatingPair:
    """Two answers to rate."""

    id: str  # Name of the row
    category: str  # Category of the instruction
    questions: tuple[str, ...]  # The user's messages up to the turn that is rated
    a: tuple[str, ...]  # Each side's answers to them. The last one is rated.
    b: tuple[str, ...]


def rating_page(sheet: str, pairs: Sequence[RatingPair]) -> str:
    """Return the sheet as one HTML page, which loads nothing and keeps the choices in the rater's browser.

    Every text is escaped, and the page's policy allows its own script alone.
    """
    script = _SCRIPT.read_text(encoding="utf-8")
    return TEMPLATES.get_template("rating.html.j2").render(
        sheet=sheet, pairs=pairs, choices=CHOICES, script=Markup(script), digest=Markup(policy_hash(script))
    )


def rating_csv(pairs: Sequence[RatingPair]) -> str:
    """Return the sheet as CSV, with an empty column `choice` to fill in."""
    rows = (
        (pair.id, pair.category, _conversation(pair.questions), _conversation(pair.a), _conversation(pair.b), "")
        for pair in pairs
    )
    return csv_text(COLUMNS, rows, end="\r\n")


def _conversation(texts: Sequence[str]) -> str:
    """Return the texts of all turns in one cell."""
    if len(texts) == 1:
        return texts[0]
    return "\n\n".join(f"[turn {turn}]\n{text}" for turn, text in enumerate(texts, start=1))
