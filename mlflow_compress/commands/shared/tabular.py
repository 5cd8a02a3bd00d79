"""What every result with rows offers: a data frame, an Arrow table, a short text, and a table in a notebook."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from mlflow_compress.metrics.core.metric_registry import all_keys
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.tables import Column, Table, filled

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from mlflow_compress.decide.scoreboard import Scoreboard
    from mlflow_compress.tracking.store import RunLink

_MOST_LINES = 24  # of the table in `repr`, which fits a terminal of 30 lines with the sentence and what is left out
_WIDEST = 160  # characters of one of its lines
_SENTENCE = 400  # characters of its sentence


class Tabular(ABC):
    """A dataclass of results that are a table of rows."""

    verdict: str  # Where a result has one, it is its summary

    def __init_subclass__(cls, **more: Any) -> None:
        """Keep the short `repr` where a dataclass would write one with every record."""
        super().__init_subclass__(**more)
        cls.__repr__ = Tabular.__repr__  # type: ignore[method-assign]

    @abstractmethod
    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows, each a dictionary with the same keys."""

    @property
    def summary(self) -> str:
        """What was found, in one sentence."""
        return self.verdict

    @property
    def remark(self) -> str:
        """What a stage says before the main job shows all values; empty where there is nothing besides values."""
        return ""

    def as_text(self) -> str:
        """Return what the command line shows."""
        return self.summary

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        values: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    def table(self) -> Table:
        """Return the rows as reports and terminals show them: a metric's label, its value with unit and interval."""
        rows, keys = self.to_rows(), all_keys()
        if not rows or not all({"name", "value", "low", "high"} <= row.keys() and row["name"] in keys for row in rows):
            return Table.of(self.frame_rows())
        names = ("name", "value", "low", "high")
        shown = [
            {"metric": keys[r["name"]].label or r["name"], "task": r.get("task"), "category": r.get("category")}
            | {"value": MetricResult(*(r[name] for name in names)), "n": r.get("n")}
            for r in rows
        ]
        return Table.of(shown)

    def frame_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows of the data frame: label and unit stand beside a metric's name, no column is always empty."""
        return with_labels(self.to_rows())

    def to_pandas(self) -> "pd.DataFrame":
        import pandas as pd

        return pd.DataFrame(list(self.frame_rows()))

    def to_arrow(self) -> "pa.Table":
        import pyarrow as pa

        return pa.Table.from_pylist([dict(row) for row in self.frame_rows()])

    def __repr__(self) -> str:
        lines = self.table().lines()
        cut = [line if len(line) <= _WIDEST else f"{line[: _WIDEST - 1]}…" for line in lines[:_MOST_LINES]]
        more = [f"({len(lines) - _MOST_LINES} more rows: to_pandas() has all)"] if len(lines) > _MOST_LINES else []
        sentence = self.summary.splitlines()[0] if len(self.summary) <= _SENTENCE else f"{self.summary[:_SENTENCE]}…"
        return "\n".join([f"{type(self).__name__}: {sentence}", "", *cut, *more])

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the sentence, then the table."""
        return f"<p>{escape(self.summary)}</p>{self.table().html()}"


def with_labels(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return rows with label and unit beside a metric's name, without columns that are always empty."""
    keys = all_keys()
    names = filled(rows)
    if "name" not in names or not any(row["name"] in keys for row in rows):
        return [{name: row[name] for name in names} for row in rows]
    flat = []
    for row in rows:
        key = keys.get(row["name"])
        shown = {"label": key.label or key.meaning, "unit": key.unit} if key else {"label": "", "unit": ""}
        flat.append({"name": row["name"], **shown, **{name: row[name] for name in names if name != "name"}})
    return flat


class ScoredVariants(Tabular):
    """A result with a scoreboard."""

    @property
    @abstractmethod
    def scores(self) -> "Scoreboard":
        """Every variant with its values."""

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        return [
            {
                "variant": row.name,
                "method": row.method,
                "status": row.status,
                "on_front": row.on_front,
                **{c.key: row.cells[c.key].value if c.key in row.cells else None for c in self.scores.columns},
                "run_id": row.run_id,
            }
            for row in self.scores.rows
        ]

    def table(self) -> Table:
        from mlflow_compress.reporting.scoreboard_text import scoreboard_table

        return scoreboard_table(self.scores)

    def frame_rows(self) -> Sequence[Mapping[str, Any]]:
        from mlflow_compress.reporting.scoreboard_text import scoreboard_frame

        return scoreboard_frame(self.scores)


def lines_of_run(run: "RunLink | None") -> list[str]:
    """Return the line that says where to look at a run, where there is one."""
    return [run.how_to_open] if run is not None and run.how_to_open else []


def aligned_lines(table: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines with aligned columns."""
    head, *rows = table
    return Table(columns=[Column(text, left=True) for text in head], rows=rows).lines(ruled=False)


_ABOUT = "what it does"  # the column that stands beside the name


@dataclass(frozen=True)
class Catalog(Tabular):
    """Registered objects of one kind, one row each."""

    kind: str  # What they are: "compression methods"
    columns: tuple[str, ...]  # The names of the cells
    rows: tuple[tuple[str, ...], ...]  # The cells; the first is the name

    def __iter__(self) -> Iterator[str]:
        return (row[0] for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, name: object) -> bool:
        return any(row[0] == name for row in self.rows)

    @property
    def summary(self) -> str:
        return f"{len(self)} {self.kind}"

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        return {row[0]: dict(zip(self.columns[1:], row[1:], strict=True)) for row in self.rows}

    def as_text(self) -> str:
        lines = []
        for row in self.to_rows():
            name, about = row[self.columns[0]], row.get(_ABOUT)
            text = "; ".join(f"{key}: {row[key]}" for key in self.columns[1:] if row[key] and key != _ABOUT)
            for part, indent in ((name if about is None else f"{name}: {about}", ""), (text, "  ")):
                lines += wrap(part, 120, initial_indent=indent, subsequent_indent="  ", break_on_hyphens=False)
        return "\n".join(lines)
