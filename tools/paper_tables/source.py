"""Reading the papers' tables, and the two kinds of rows that come out."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PAPERS = Path(__file__).resolve().parents[2] / "tests" / "golden" / "published" / "papers"

Row = dict[str, str]


@dataclass(frozen=True)
class Check:
    """An identity between printed cells."""

    table: str
    identity: str  # what must hold, as one sentence
    computed_with: str  # our function, or "arithmetic"
    n: int  # cells or rows that were checked
    breaks: tuple[str, ...] = ()  # by name, with the printed and the recomputed value

    @property
    def holds(self) -> int:
        """Number of cells in which the identity holds."""
        return self.n - len(self.breaks)


@dataclass(frozen=True)
class Claim:
    """A number in a paper's text beside what its own tables give."""

    table: str
    quantity: str
    published: str  # what the text says; "no number" where it says it in words
    ours: str  # what the tables give


def read(name: str) -> list[Row]:
    """Return the rows of one table as printed; `NA` means that no value was printed."""
    with (PAPERS / f"{name}.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


def unit(printed: str) -> float:
    """Return one unit in the last printed digit: 0.01 for "4.87"."""
    return 10.0 ** -len(printed.partition(".")[2])


def agrees(value: float, printed: str, *, units: float = 1.0) -> bool:
    """Return whether a value lies within some units of the last printed digit (1: cut digits, 0.5: rounded ones)."""
    return abs(value - float(printed)) <= units * unit(printed) * (1 + 1e-9)


def broken(cells: Iterable[tuple[str, bool]]) -> tuple[int, tuple[str, ...]]:
    """Return how many cells there are and the names of those that do not hold."""
    named = list(cells)
    return len(named), tuple(name for name, holds in named if not holds)
