"""One table: as text for a terminal, as Markdown, HTML and CSV, and as columns for a data frame."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mlflow_compress.metrics.core.metric_registry import all_keys
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.numbers import number_text

MISSING = "-"
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


@dataclass(frozen=True)
class Named:
    """The name of a row, with what it means in small print where there is room, and a link."""

    text: str
    note: str = ""
    address: str = ""
    code: bool = False  # Whether the text is a key, and not words

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Column:
    """A column: its label, and on which side its cells stand."""

    label: str
    left: bool = False  # Texts stand left, numbers right


Cell = str | float | bool | None | Named | MetricResult
"""A result is shown with its interval, in the unit that its metric declares."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns and rows; how they look is each renderer's."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    whole: frozenset[int] = frozenset()  # Rows that the rows under them are parts of
    shades: Sequence[Sequence[int | None]] = ()  # For a heat map: of every cell but the first, by row

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> Table:
        """Return the table of rows that share their keys, without columns that are always empty."""
        names = filled(records)
        numbers = {n for n in names if all(isinstance(r[n], int | float | None) for r in records)}
        return cls(
            columns=[Column(name.replace("_", " "), left=name not in numbers) for name in names],
            rows=[[_plain(record[name]) for name in names] for record in records],
        )

    def only(self, *labels: str) -> Table:
        """Return some of the columns."""
        places = [i for i, column in enumerate(self.columns) if column.label in labels]
        rows = [[row[i] for i in places] for row in self.rows]
        return replace(self, columns=[self.columns[i] for i in places], rows=rows)

    def filled(self) -> Table:
        """Return the columns that are not empty in every row."""
        return self.only(*(c.label for i, c in enumerate(self.columns) if any(_has(row[i]) for row in self.rows)))

    def texts(self) -> list[list[str]]:
        """Return the cells as text."""
        return [[cell_text(cell) for cell in row] for row in self.rows]

    def lines(self, *, wrapped: bool = False, ruled: bool = True, widest: int | None = None) -> list[str]:
        """Return the aligned lines of a terminal; labels are wrapped to the width of their cells if wanted."""
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
        """Return the table as Markdown."""
        sides = "|".join("---" if i == 0 else ":--" if c.left else "--:" for i, c in enumerate(self.columns))
        lines = [[column.label for column in self.columns], *self.texts()]
        head, *rows = (f"| {' | '.join(map(escape_markdown, line))} |" for line in lines)
        return "\n".join([head, f"|{sides}|", *rows])

    def html(self, class_: str = "wide") -> str:
        """Return the table as HTML, every text escaped."""
        module: Any = TEMPLATES.get_template("tables.html.j2").module
        return str(module.show(self, class_))


def cell_text(cell: Cell) -> str:
    """Return a cell as text; "-" where there is nothing."""
    if cell is None:
        return MISSING
    if isinstance(cell, MetricResult):
        return result_text(cell)
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.6g}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


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


def csv_text(head: Iterable[object], rows: Iterable[Iterable[object]], *, end: str = "\n") -> str:
    """Return rows as CSV in which no spreadsheet takes a text for a formula: an apostrophe goes before it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator=end)
    for row in (head, *rows):
        writer.writerow([f"'{v}" if isinstance(v, str) and v.startswith(_FORMULA) else v for v in row])
    return out.getvalue()


def escape_markdown(text: str) -> str:
    """Return a text without column breaks, line breaks, stress and HTML."""
    for sign, escaped in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("*", "\\*"), ("\n", " ")):
        text = text.replace(sign, escaped)
    return text
