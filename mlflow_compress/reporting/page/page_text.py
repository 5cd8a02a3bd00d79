"""The page's tables as Markdown, for a pull request, and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlflow_compress.decide.gates import DECODE_SPEEDUP, FLIPS, KL, MEMORY_RATIO, RATIO, DivergenceGate, Gate
from mlflow_compress.decide.scoreboard import Scoreboard, ScoreColumn
from mlflow_compress.reporting.html import settings_table
from mlflow_compress.reporting.page.page_content import PageContent
from mlflow_compress.reporting.page.page_tables import flips_by_part, heat_map, items_by_task, made_table, shared_table
from mlflow_compress.reporting.scoreboard_text import score_text, scoreboard_markdown
from mlflow_compress.reporting.tables import escape_markdown

_TOLD = (RATIO, KL, FLIPS, DECODE_SPEEDUP, MEMORY_RATIO)
_FIRST = {"size": "the smallest", "kl": "the closest", "speed": "the fastest", "utility": "the most useful"}


def choice_sentence(content: PageContent) -> str:
    """Return the variant that the policy chooses, or that none passes, as one sentence."""
    decision, board = content.decision, content.board
    if not decision.outcomes:
        return "No variant has results, so there is nothing to ship."
    if decision.champion is None:
        return f"Ship none of them yet: no variant passes {content.policy}."
    return f"Ship {decision.champion.name}: {_values(board, decision.champion.name)}."


def choice_reason(content: PageContent) -> str:
    """Return why, as one sentence; empty where no variant has results."""
    decision = content.decision
    if not decision.outcomes:
        return ""
    if decision.champion is None:
        return _nearest(content)
    n, passing = len(decision.outcomes), sum(outcome.passed for outcome in decision.outcomes)
    if n == 1:
        return f"It passes {content.policy}."
    if passing == 1:
        return f"It is the only one of {n} variants that passes {content.policy}."
    return f"It is {_FIRST[content.objective]} of the {passing} variants, of {n}, that pass {content.policy}."


def _values(board: Scoreboard, name: str) -> str:
    row = next(row for row in board.rows if row.name == name)
    columns: dict[str, ScoreColumn] = {column.key: column for column in board.columns}
    labels = {RATIO: "{} smaller", KL: "KL {}", FLIPS: "{} of answers flipped"}
    labels |= {DECODE_SPEEDUP: "decodes at {} the baseline's speed", MEMORY_RATIO: "{} its peak memory"}
    return ", ".join(
        labels[key].format(score_text(row.cells[key], columns[key], interval=True))
        for key in _TOLD
        if key in row.cells and key in columns
    )


def _nearest(content: PageContent) -> str:
    """Return why the closest variant fails; the scoreboard is sorted by closeness."""
    outcomes = {o.candidate.name: o for o in content.decision.outcomes}
    closest = next(row.name for row in content.board.rows if row.name in outcomes)
    reasons = outcomes[closest].failed
    return f"The closest to the baseline, {closest}, fails: {'; '.join(reasons)}."


def gate_texts(gates: Sequence[Gate | DivergenceGate]) -> list[str]:
    """Return each gate in words."""
    return [
        f"{gate.label} at {'least' if gate.at_least else 'most'} {gate.bound:g}"
        if isinstance(gate, Gate)
        else f"KL (upper end) at most {gate.max_kl:g} nats"
        for gate in gates
    ]


def sample_prompts(content: PageContent) -> dict[str, str]:
    """Return the prompt of the first item of each task."""
    if content.items is None:
        return {}
    tasks = content.items.column("task")
    first = {str(task): row for row, task in reversed(list(enumerate(tasks)))}
    prompts = content.items.table.column("prompt")
    return {task: prompts[row].as_py() or "" for task, row in sorted(first.items())}


MOST_COLUMNS = 12
"""Most variants that a Markdown table has as columns."""


def page_markdown(content: PageContent) -> str:
    """Return the choice, the scoreboard, the groups, the flips by category and the set-up as Markdown."""
    parts = [
        f"**{escape_markdown(choice_sentence(content))}** {escape_markdown(choice_reason(content))}",
        scoreboard_markdown(content.board),
        _groups(content),
    ]
    if len(content.variants) <= MOST_COLUMNS:
        heat, shared = heat_map(content), shared_table(content)
        parts += [heat.markdown()] if heat.rows else []
        parts += [shared.table.markdown()] if shared is not None else []
    setup = settings_table(content.setup)
    parts.append(f"<details><summary>How it was measured</summary>\n\n{setup.markdown()}\n\n</details>")
    return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


def _groups(content: PageContent) -> str:
    labels = {column.key: column.label for column in content.board.columns}
    lines = [
        f"- {escape_markdown(labels[metric])}: cannot be told apart: {escape_markdown(', '.join(group))}"
        for metric, groups in content.board.groups.items()
        for group in groups
    ]
    return "\n".join(lines)


def content_values(content: PageContent) -> dict[str, Any]:
    """Return every table of the page as plain values, ready for JSON."""
    shared, made = shared_table(content), made_table(content)
    alike = content.similarity
    return {
        "choice": f"{choice_sentence(content)} {choice_reason(content)}".rstrip(),
        "gates": [
            {"variant": o.candidate.name, "passed": o.passed, "rank": o.rank, "failed": list(o.failed)}
            for o in content.decision.outcomes
        ],
        "scoreboard": content.board.to_dict(),
        "flips_by_category": [
            {
                "task": task,
                "category": category,
                "variants": {
                    name: {part: getattr(result, part) for part in ("value", "low", "high", "n")}
                    for name, result in found.items()
                },
            }
            for (task, category), found in flips_by_part(content).items()
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
        "made": [
            {
                "name": v.name,
                "run_id": v.run_id,
                "address": v.address,
                "cells": dict(zip((column.label for column in made.columns[1:]), row[1:], strict=True)),
            }
            for v, row in zip(content.variants, made.rows, strict=True)
        ],
        "items_by_task": [dict(zip(("task", "family", "n"), row, strict=True)) for row in items_by_task(content).rows],
        "setup": dict(content.setup),
        "notes": list(content.notes),
    }
