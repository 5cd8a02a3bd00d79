"""One table: as text for a terminal, as Markdown, HTML and CSV, and as columns for a data frame."""

import base64
import csv
import hashlib
import io
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from mlflow_compress.metrics.core.metric_registry import all_keys
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.numbers import number_text

_MISSING = "-"
LEVELS = 8
"""Shades of a heat map, and of a thought."""

_NARROWEST = 9  # characters of a wrapped label on one line
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet computes a text that begins with one of these
_HERE = Path(__file__).parent
# Every value is escaped, whatever the template's file suffix is. An undefined name in a template is an error.
TEMPLATES = Environment(
    loader=FileSystemLoader([_HERE / "templates", _HERE / "page" / "templates"]),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.globals["levels"] = LEVELS
_SMALL = re.compile(r"(\d+(?:\.\d+)?e-\d+)")
# Browsers break 2.3e-05 after its hyphen.
TEMPLATES.filters["whole_numbers"] = lambda text: Markup(
    _SMALL.sub(r'<span class="whole">\1</span>', str(escape(text)))
)


@dataclass(frozen=True)
class Words:
    """A text with what a page shows besides: a style, small print under it, a link, a sign behind it."""

    text: str
    notes: "Sequence[str | Words]" = ()
    style: str = ""  # "same" (grey), "better", "worse", "code" or another class of the page's style
    address: str = ""
    sign: str = ""  # "*": on the Pareto front; "!": differs from the baseline's
    value: str | float | None = None  # What a script sorts and finds the cell by

    def __str__(self) -> str:
        return f"{self.text} {self.sign}".rstrip()


@dataclass(frozen=True)
class Column:
    """A column: its label, how its cells stand, and what it is."""

    label: str
    left: bool = False  # Texts stand left, numbers right
    long: bool = False  # Texts of several lines, in which a bracket is no interval
    key: str = ""  # By which it is selected
    direction: str = ""  # "higher" or "lower" if one is better


Cell = str | float | bool | None | Words | MetricResult
"""A result is shown with its interval, in the unit that its metric declares."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns and rows; how they look is each renderer's."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    strong: frozenset[int] = frozenset()  # Rows that stand out: those that the rows under them are parts of
    shades: Sequence[Sequence[int | None]] = ()  # For a heat map: of every cell but the first, by row

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> "Table":
        """Return the table of rows that share their keys, without columns that are always empty."""
        names = filled(records)
        numbers = {n for n in names if all(isinstance(r[n], int | float | None) for r in records)}
        return cls(
            columns=[Column(name.replace("_", " "), left=name not in numbers) for name in names],
            rows=[[_plain(record[name]) for name in names] for record in records],
        )

    @classmethod
    def of_pairs(cls, pairs: Iterable[tuple[str, str]]) -> "Table":
        """Return the table of names and their values, without a head."""
        rows = [(name, Words(value, style="code")) for name, value in pairs]
        return cls(columns=[Column("", left=True), Column("", long=True)], rows=rows)

    def only(self, *keys: str) -> "Table":
        return self._at([i for i, column in enumerate(self.columns) if column.key in keys])

    def filled(self) -> "Table":
        """Return the columns that are not empty in every row."""
        return self._at([i for i in range(len(self.columns)) if any(_has(row[i]) for row in self.rows)])

    def _at(self, places: Sequence[int]) -> "Table":
        rows = [[row[i] for i in places] for row in self.rows]
        return replace(self, columns=[self.columns[i] for i in places], rows=rows)

    def words(self) -> list[list[Words]]:
        """Return the cells as a page shows them: grey where there is nothing."""
        return [[_words(cell) for cell in row] for row in self.rows]

    def texts(self) -> list[list[str]]:
        return [[cell_text(cell) for cell in row] for row in self.rows]

    def lines(self, *, wrapped: bool = False, ruled: bool = True, widest: int | None = None) -> list[str]:
        """Return the aligned lines of a terminal; labels are wrapped to the width of their cells if wanted."""
        if not self.columns:
            return []
        rows = self.texts()
        cells = list(zip(*rows, strict=True)) or [()] * len(self.columns)
        heads = [
            textwrap.wrap(c.label, max([_NARROWEST, *map(len, own)]), break_long_words=False) if wrapped else [c.label]
            for c, own in zip(self.columns, cells, strict=True)
        ]
        height = max(map(len, heads))
        top = list(zip(*([""] * (height - len(head)) + head for head in heads), strict=True))
        table = [*top, *rows]
        widths = [max(len(line[i]) for line in table) for i in range(len(heads))]
        lines = [
            "  ".join(
                text.ljust(width) if column.left else text.rjust(width)
                for text, width, column in zip(line, widths, self.columns, strict=True)
            ).rstrip()
            for line in table
        ]
        rule = ["-" * min(max(map(len, lines)), widest or 10_000)] if ruled else []
        return [*lines[:height], *rule, *lines[height:]]

    def markdown(self) -> str:
        sides = "|".join("---" if i == 0 else ":--" if c.left else "--:" for i, c in enumerate(self.columns))
        lines = [[column.label for column in self.columns], *self.texts()]
        head, *rows = (f"| {' | '.join(map(escape_markdown, line))} |" for line in lines)
        return "\n".join([head, f"|{sides}|", *rows])

    def html(self) -> str:
        module: Any = TEMPLATES.get_template("tables.html.j2").module
        return str(module.show(self, "wide"))


def cell_text(cell: Cell) -> str:
    """Return a cell as text; "-" where there is nothing."""
    if cell is None:
        return _MISSING
    if isinstance(cell, MetricResult):
        return result_text(cell)
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.6g}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def _words(cell: Cell) -> Words:
    if isinstance(cell, Words):
        return cell
    text = cell_text(cell)
    return Words(text, style="same" if cell is False or text == _MISSING else "")


def result_text(result: MetricResult) -> str:
    """Return a result with its interval, in the unit that its metric declares."""
    declared = all_keys().get(result.name)
    unit, difference = (declared.unit, declared.is_difference) if declared is not None else ("", False)
    return number_text(result, unit, difference=difference)


def _plain(value: Any) -> Cell:
    if value is None or isinstance(value, str | int | float | MetricResult):
        return value
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def filled(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys of rows, without those that are None or empty in every row."""
    return [name for name in (records[0] if records else ()) if any(_has(record[name]) for record in records)]


def _has(value: Any) -> bool:
    return value is not None and not (isinstance(value, Sized) and len(value) == 0)


def csv_text(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Return rows as CSV in which no spreadsheet takes a text for a formula: an apostrophe goes before it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in (head, *rows):
        writer.writerow([f"'{v}" if isinstance(v, str) and v.startswith(_FORMULA) else v for v in row])
    return out.getvalue()


def policy_hash(text: str) -> str:
    """Return a script or a style as a page's content security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def escape_markdown(text: str) -> str:
    """Return a text without column breaks, line breaks, stress and HTML; "<=" stays as it is, as it opens no tag."""
    for sign, escaped in (("&", "&amp;"), ("|", "\\|"), ("*", "\\*"), ("\n", " ")):
        text = text.replace(sign, escaped)
    return re.sub(r"<(?![=\s\d])", "&lt;", text)
