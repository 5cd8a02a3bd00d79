"""The page's tables as Markdown, for a pull request, and as plain values for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mlflow_compress.reporting.headline_text import escape_markdown
from mlflow_compress.reporting.html import setting_pairs
from mlflow_compress.reporting.page.choice import choice_reason, choice_sentence, failed_reasons
from mlflow_compress.reporting.page.made_table import items_by_task, made_table
from mlflow_compress.reporting.page.page_content import PageContent
from mlflow_compress.reporting.page.shared_tables import HeatCell, heat_map, shared_table
from mlflow_compress.reporting.scoreboard_text import scoreboard_markdown

MOST_COLUMNS = 12
"""Most variants that a Markdown table has as columns."""


def page_markdown(content: PageContent) -> str:
    """Return the choice, the scoreboard, the groups, the flips by category and the set-up as Markdown."""
    parts = [
        f"**{_cell(choice_sentence(content))}** {_cell(choice_reason(content))}",
        scoreboard_markdown(content.board),
        _groups(content),
    ]
    heat = heat_map(content)
    if heat.rows and len(heat.variants) <= MOST_COLUMNS:
        head = ["flips, %", "items", *heat.variants]
        rows = [
            [row.task if row.category is None else f"{row.task}: {row.category}", f"{row.n:,}", *map(_heat, row.cells)]
            for row in heat.rows
        ]
        parts.append(_table(head, rows))
    shared = shared_table(content)
    if shared is not None and len(shared.variants) <= MOST_COLUMNS:
        rows = [[name, *map(str, row)] for name, row in zip(shared.variants, shared.together, strict=True)]
        parts.append(_table(["changed by both", *shared.variants], rows))
    setup = [[name, value] for name, value in setting_pairs(content.setup)]
    parts.append(f"<details><summary>How it was measured</summary>\n\n{_table(['', ''], setup)}\n\n</details>")
    return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


def _cell(text: object) -> str:
    return escape_markdown(str(text)).replace("*", "\\*")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, *rows]
    shown = [f"| {' | '.join(map(_cell, line))} |" for line in lines]
    return "\n".join([shown[0], f"|---{'|--:' * (len(head) - 1)}|", *shown[1:]])


def _heat(cell: HeatCell | None) -> str:
    if cell is None:
        return "-"
    found = cell.result
    bounds = "" if found.low is None or found.high is None else f" [{found.low:.1f}, {found.high:.1f}]"
    return f"{found.value:.1f}{bounds}"


def _groups(content: PageContent) -> str:
    labels = {column.key: column.label for column in content.board.columns}
    lines = [
        f"- {_cell(labels[metric])}: cannot be told apart: {_cell(', '.join(group))}"
        for metric, groups in content.board.groups.items()
        for group in groups
    ]
    return "\n".join(lines)


def content_values(content: PageContent) -> dict[str, Any]:
    """Return every table of the page as plain values, ready for JSON."""
    heat, shared, made = heat_map(content), shared_table(content), made_table(content)
    alike = content.similarity
    return {
        "choice": f"{choice_sentence(content)} {choice_reason(content)}".rstrip(),
        "gates": [
            {"variant": o.candidate.name, "passed": o.passed, "rank": o.rank, "failed": failed_reasons(o)}
            for o in content.decision.outcomes
        ],
        "scoreboard": content.board.to_dict(),
        "flips_by_category": [
            {
                "task": row.task,
                "category": row.category,
                "variants": {
                    name: {key: getattr(cell.result, key) for key in ("value", "low", "high", "n")}
                    for name, cell in zip(heat.variants, row.cells, strict=True)
                    if cell is not None
                },
            }
            for row in heat.rows
        ],
        "shared_changes": None
        if shared is None
        else {
            "variants": shared.variants,
            "together": shared.together,
            "items_changed_by_k_variants": shared.by_count,
            "items": shared.n_items,
        },
        "answer_similarity": None
        if alike is None
        else {
            "models": alike.names,
            "values": alike.values.tolist(),
            "components": alike.coordinates.tolist(),
            "shares": alike.shares,
            "encoder": alike.encoder,
            "left_out": alike.left_out,
        },
        "made": [asdict(row) | {"cells": dict(zip(made.columns, row.cells, strict=True))} for row in made.rows],
        "items_by_task": items_by_task(content),
        "setup": dict(content.setup),
        "notes": list(content.notes),
    }
