"""What a sweep does at this moment: a table that renews itself on a terminal, quiet lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from mlflow_compress.commands.sweep.result import SweepProgress, VariantProgress

_COLOURS = {"runs": "cyan", "finished": "green", "found": "green", "failed": "red"}


@contextmanager
def shown(say: Callable[[str], None]) -> Iterator[Callable[[SweepProgress], None]]:
    """Yield what shows the progress of a sweep on the standard error.

    Parameters
    ----------
    say : callable (line)
        Prints one line; it is used for all lines where the standard error is no terminal.
    """
    if not sys.stderr.isatty():
        yield lambda progress: say(progress.line)
        return
    import logging

    from rich.console import Console
    from rich.live import Live

    logging.getLogger("mlflow").setLevel(logging.WARNING)  # its lines would stand between the rows

    with Live(console=Console(stderr=True), auto_refresh=False, redirect_stdout=False) as live:

        def show(progress: SweepProgress) -> None:
            if progress.variants:
                live.update(table(progress.variants), refresh=True)
            else:
                live.console.print(progress.line, markup=False, highlight=False)

        yield show


def table(variants: tuple[VariantProgress, ...]) -> Table:
    """Return the table of all variants: state, and what happens or was found."""
    from rich.table import Table
    from rich.text import Text

    found = Table(box=None, pad_edge=False, expand=True)
    for name in ("variant", "state"):
        found.add_column(name, no_wrap=True)
    found.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
    for variant in variants:
        state = Text(variant.state, style=_COLOURS.get(variant.state, "dim"))
        found.add_row(Text(variant.name), state, Text(variant.doing))
    return found
