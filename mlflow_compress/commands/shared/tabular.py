"""What every result with rows offers: pandas, Arrow, a dictionary, and a table in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from mlflow_compress.tracking.store import RunLink


class Tabular(ABC):
    """A result that is a table of rows."""

    @abstractmethod
    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows, each a dictionary with the same keys."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """What was found, in one sentence."""

    def as_text(self) -> str:
        """Return what the command line shows."""
        return self.summary

    def to_pandas(self) -> pd.DataFrame:
        """Return the rows as a pandas data frame."""
        import pandas as pd

        return pd.DataFrame(list(self.to_rows()))

    def to_arrow(self) -> pa.Table:
        """Return the rows as an Arrow table."""
        import pyarrow as pa

        return pa.Table.from_pylist([dict(row) for row in self.to_rows()])

    def notebook_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows that a notebook shows: all of them, unless a result has too many."""
        return self.to_rows()

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the sentence, then rows."""
        from html import escape

        import pandas as pd

        table = pd.DataFrame(list(self.notebook_rows())).to_html(index=False, na_rep="", border=0)
        return f"<p>{escape(self.summary)}</p>{table}"


def lines_of_run(run: RunLink | None) -> list[str]:
    """Return the line that says where to look at a run, where there is one."""
    return [run.how_to_open] if run is not None and run.how_to_open else []


def aligned_lines(table: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines with aligned columns."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]) - 1)]
    return ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in table]
