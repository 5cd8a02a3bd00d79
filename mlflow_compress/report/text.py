"""The headline table as plain text for a terminal and as Markdown for an MLflow run's note."""

from __future__ import annotations

from mlflow_compress.report.rows import Pooled, Row, Sizes, headline_rows, interval_percent

NOTE_LIMIT = 8000
_WIDTH = 100
_EMPTY = "-"


def _cells(row: Row) -> tuple[str, str, str, str]:
    return row.label, row.baseline or _EMPTY, row.variant or _EMPTY, row.difference or _EMPTY


def _header(pooled: Pooled) -> tuple[str, str, str, str]:
    return "metric", "baseline", "variant", f"difference [{interval_percent(pooled)} interval]"


def headline_table(pooled: Pooled, manifest: Sizes | None = None) -> str:
    """Return an aligned table of at most 16 rows and 100 columns: metric, baseline, variant, difference [interval].

    Parameters
    ----------
    pooled : mapping of str to MetricResult
        Pooled results by key: `metrics.headline(results)`.
    manifest : Sizes, optional
        The compression manifest, for the rows about size.
    """
    lines = [_header(pooled), *(_cells(row) for row in headline_rows(pooled, manifest))]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    text = [
        f"{name:<{widths[0]}}  {baseline:>{widths[1]}}  {variant:>{widths[2]}}  {difference}"
        for name, baseline, variant, difference in lines
    ]
    rule = "-" * min(_WIDTH, max(map(len, text)))
    return "\n".join([text[0], rule, *text[1:]])


def _escape(text: str) -> str:
    """Keep a cell in its cell: no column or line breaks, no HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("\n", " ")


def note_markdown(sentence: str, pooled: Pooled, manifest: Sizes | None = None) -> str:
    """Return Markdown for a run's note, under 8000 characters: the verdict, then the headline table.

    Parameters
    ----------
    sentence : str
        The verdict; it becomes the first line.
    pooled, manifest
        As in `headline_table`.
    """
    head = [_escape(sentence)[: NOTE_LIMIT // 2], "", "| " + " | ".join(_header(pooled)) + " |", "|---|--:|--:|:--|"]
    lines = ["| " + " | ".join(map(_escape, _cells(row))) + " |" for row in headline_rows(pooled, manifest)]
    return "\n".join(head + lines)
