"""A list of what there is: methods, tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlflow_compress.commands.shared.tabular import Tabular, aligned_lines


@dataclass(frozen=True)
class Listing(Tabular):
    """Registered objects of one kind, one row each."""

    kind: str  # What they are: "compression methods"
    columns: tuple[str, ...]  # The names of the cells
    rows: tuple[tuple[str, ...], ...]  # The cells; the first is the name

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return (row[0] for row in self.rows)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.rows)

    def __contains__(self, name: object) -> bool:
        """Return whether there is one of this name."""
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
        """Return a table with aligned columns."""
        return "\n".join(aligned_lines([self.columns, *self.rows]))
