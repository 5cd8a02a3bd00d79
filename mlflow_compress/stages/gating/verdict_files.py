"""The verdict of a gate as JSON and Markdown."""

from __future__ import annotations

import json
from pathlib import Path

from mlflow_compress import atomic
from mlflow_compress.reporting.headline_text import escape_markdown
from mlflow_compress.results import GateRow, GateVerdict

JSON, MARKDOWN = "verdict.json", "verdict.md"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _when(row: GateRow) -> str:
    if row.by == "checkpoint":
        return "from the checkpoint"
    if row.by == "timing":
        return "by timing"
    if row.by == "all items":
        return "after all items"
    return "" if row.decided_after is None else f"after {row.decided_after} items"


def verdict_markdown(found: GateVerdict) -> str:
    """Return the verdict as Markdown, as a job summary shows it."""
    lines = [
        f"## {'Passed' if found.passed else 'Failed'}: {escape_markdown(f'{found.variant} against {found.baseline}')}",
        "",
        escape_markdown(found.verdict),
        "",
        "| gate | claim | verdict | decided | value so far | items |",
        "|--:|---|---|---|--:|--:|",
    ]
    for row in found.rows:
        cells = (row.gate, row.reason or row.name, row.verdict, _when(row), _number(row.value), row.n or "")
        lines.append(f"| {' | '.join(escape_markdown(str(cell)) for cell in cells)} |")
    notes = [
        *found.remarks,
        f"Early verdicts: any of them is wrong with a probability of at most {100 * found.error:g} %.",
        f"Order of the items: seed {found.seed}. Policy: sha256 {found.policy_sha256[:16]}.",
    ]
    return "\n".join([*lines, "", *(f"- {escape_markdown(note)}" for note in notes), ""])


def verdict_json(found: GateVerdict) -> str:
    """Return the verdict as one JSON object."""
    return json.dumps({**found.to_dict(), "exit_code": found.exit_code}, indent=1, allow_nan=False) + "\n"


def write_verdict(found: GateVerdict, folder: Path) -> None:
    """Write both files into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write(folder / JSON, verdict_json(found).encode())
    atomic.write(folder / MARKDOWN, verdict_markdown(found).encode())
