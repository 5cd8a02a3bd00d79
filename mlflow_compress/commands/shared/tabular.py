"""What every result with rows offers: pandas, Arrow, a dictionary, and a table in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


class Tabular(ABC):
    """A result that is a table of rows."""

    @abstractmethod
    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows, each a dictionary with the same keys."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """What was found, in one sentence."""

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
