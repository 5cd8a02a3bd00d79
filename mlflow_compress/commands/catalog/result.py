"""A list of what there is: methods, tasks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from mlflow_compress.commands.shared.tabular import Tabular

ABOUT = "what it does"  # the column that stands beside the name


@dataclass(frozen=True)
class Listing(Tabular):
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
        """How many there are."""
        return f"{len(self)} {self.kind}"

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per object."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """Return the rows by name."""
        return {row[0]: dict(zip(self.columns[1:], row[1:], strict=True)) for row in self.rows}

    def as_text(self) -> str:
        """Return the name of each, and below it its other cells, in lines of at most 120 characters."""
        lines = []
        for row in self.to_rows():
            name, about = row[self.columns[0]], row.get(ABOUT)
            text = "; ".join(f"{key}: {row[key]}" for key in self.columns[1:] if row[key] and key != ABOUT)
            for part, indent in ((name if about is None else f"{name}: {about}", ""), (text, "  ")):
                lines += wrap(part, 120, initial_indent=indent, subsequent_indent="  ", break_on_hyphens=False)
        return "\n".join(lines)
