"""The headline table as plain text for the terminal, and as Markdown for an MLflow run's note."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from mlflow_compress.reporting.footnotes import failures, footnotes
from mlflow_compress.reporting.rows import HeadlineRow, Pooled, Sizes, headline_rows, interval_percent

NOTE_LIMIT = 8000
_PART_LIMIT = 2000  # characters of a verdict or an error message, so that the table fits after them
_WIDTH = 100
_EMPTY = "-"


def _cells(row: HeadlineRow) -> tuple[str, ...]:
    return row.label, row.n or "", row.baseline or _EMPTY, row.variant or _EMPTY, row.difference or _EMPTY


def _header(pooled: Pooled) -> tuple[str, ...]:
    return "metric", "n", "baseline", "variant", f"difference [{interval_percent(pooled)} interval]"


def headline_table(
    pooled: Pooled,
    manifest: Sizes | None = None,
    *,
    gates: Mapping[str, float] | None = None,
    n_truncated: int = 0,
    failed_stages: Mapping[str, str] | None = None,
) -> str:
    """Return the headline table as aligned text, followed by notes.

    Parameters
    ----------
    pooled : mapping of str to MetricResult
        Pooled results by key: `metrics.headline(results)`.
    manifest : Sizes, optional
        The checkpoint's manifest, for the rows about size.
    gates, n_truncated
        See `footnotes.footnotes`.
    failed_stages
        See `footnotes.failures`.
    """
    lines = [_header(pooled), *(_cells(row) for row in headline_rows(pooled, manifest, gates))]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    text = [
        f"{name:<{widths[0]}}  {n:>{widths[1]}}  {baseline:>{widths[2]}}  {variant:>{widths[3]}}  {difference}"
        for name, n, baseline, variant, difference in lines
    ]
    rule = "-" * min(_WIDTH, max(map(len, text)))
    notes = failures(failed_stages) + footnotes(pooled, gates=gates, n_truncated=n_truncated)
    wrapped = [line for note in notes for line in textwrap.wrap(note, _WIDTH)]
    return "\n".join([text[0], rule, *text[1:], *([rule, *wrapped] if wrapped else [])])


def escape_markdown(text: str) -> str:
    """Return a cell's text without column breaks, line breaks and HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("\n", " ")


def note_markdown(
    sentence: str,
    pooled: Pooled,
    manifest: Sizes | None = None,
    *,
    gates: Mapping[str, float] | None = None,
    n_truncated: int = 0,
    failed_stages: Mapping[str, str] | None = None,
) -> str:
    """Return a run's note as Markdown of at most 8000 characters: verdict, failed stages, headline table, notes.

    Parameters
    ----------
    sentence : str
        The verdict, which is the first line.
    pooled, manifest, gates, n_truncated, failed_stages
        As in `headline_table`.
    """
    head = [escape_markdown(sentence)[:_PART_LIMIT], ""]
    for failure in failures(failed_stages):
        head += [f"**{escape_markdown(failure)[:_PART_LIMIT]}**", ""]
    header = _header(pooled)
    lines = ["| " + " | ".join(header) + " |", "|---|--:|--:|--:|:--|"]
    lines += [
        "| " + " | ".join(map(escape_markdown, _cells(row))) + " |" for row in headline_rows(pooled, manifest, gates)
    ]
    notes = [
        line for note in footnotes(pooled, gates=gates, n_truncated=n_truncated) for line in ("", escape_markdown(note))
    ]
    return "\n".join(head + lines + notes)
