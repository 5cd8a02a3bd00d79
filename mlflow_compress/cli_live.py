"""What happens at this moment: on a terminal, a table of a sweep's variants that renews itself; elsewhere, lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from mlflow_compress.commands.sweep.result import SweepProgress, VariantProgress

_COLOURS = {"runs": "cyan", "finished": "green", "found": "green", "failed": "red"}


@contextmanager
def shown(say: Callable[[str], None]) -> Iterator[Callable[[str | SweepProgress], None]]:
    """Yield what shows the progress of a command on the standard error, where `say` prints one line."""
    live: Live | None = None
    with ExitStack() as opened:

        def show(progress: str | SweepProgress) -> None:
            nonlocal live
            if isinstance(progress, str) or not sys.stderr.isatty():
                say(str(progress))
                return
            if live is None:
                live = opened.enter_context(_live())
            if progress.variants:
                live.update(table(progress.variants), refresh=True)
            else:
                live.console.print(progress.line, markup=False, highlight=False)

        yield show


def _live() -> Live:
    import logging

    from rich.console import Console
    from rich.live import Live

    logging.getLogger("mlflow").setLevel(logging.WARNING)  # its lines would stand between the rows
    return Live(console=Console(stderr=True), auto_refresh=False, redirect_stdout=False)


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
