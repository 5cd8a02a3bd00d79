"""The page over variants as one HTML file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mlflow_compress.decide.gates import DELTA
from mlflow_compress.reporting.html import FlipRow, setting_pairs
from mlflow_compress.reporting.page.page_content import PageContent, page_data
from mlflow_compress.reporting.page.page_tables import (
    LEVELS,
    alike_table,
    flips_by_part,
    heat_map,
    items_by_task,
    made_table,
    shared_table,
)
from mlflow_compress.reporting.page.page_text import (
    choice_reason,
    choice_sentence,
    failed_reasons,
    sample_prompts,
)
from mlflow_compress.reporting.scoreboard_text import correlation_text, finding, legend, main_correlations, score_text
from mlflow_compress.reporting.tables import TEMPLATES

_HERE = Path(__file__).parent
MOST_WARNINGS = 6
_FIRST = 20  # changed answers, and answers, of the page without scripts
_MOST_HEAT_INTERVALS = 2_000  # cells; more would be no figure


def render_page(content: PageContent) -> str:
    """Return the page over variants as one HTML text, which loads nothing and runs only its own scripts.

    The scripts stand in the page, and its policy names their hashes. What models wrote is escaped in the tables, and is
    compressed in the data that the scripts read, so that nothing in it can be read as markup.
    """
    data, values = page_data(content)
    changes, answers = values["changes"], values["answers"]
    style = TEMPLATES.get_template("report.css").render() + TEMPLATES.get_template("page.css.j2").render(levels=LEVELS)
    libraries = (_HERE / "vendor" / "libraries.min.js").read_text(encoding="utf-8")
    script = "".join(path.read_text(encoding="utf-8") for path in sorted((_HERE / "scripts").glob("*.js")))
    board = content.board
    intervals = len(flips_by_part(content)) * len(content.variants) <= _MOST_HEAT_INTERVALS
    return TEMPLATES.get_template("page.html.j2").render(
        title=content.title,
        security=_security_policy(style, [libraries, script]),
        style=Markup(style),
        libraries=Markup(libraries),
        script=Markup(script),
        data=data,
        choice=choice_sentence(content),
        reason=choice_reason(content),
        policy=content.policy,
        gates=content.gates,
        warnings=[warning.text for warning in board.warnings],
        most_warnings=MOST_WARNINGS,
        finding=finding(board),
        interval=f"{100 * board.level:g} %",
        columns=[column for column in board.columns if column.main],
        board=_score_rows(content),
        legend=[line.replace("*", "★", 1) for line in legend(board)],
        verdicts=_verdicts(content),
        groups=_groups(content),
        heat=heat_map(content, intervals=intervals),
        heat_intervals=intervals,
        shared=shared_table(content),
        alike=alike_table(content),
        similarity=content.similarity,
        correlations=[correlation_text(board, found) for found in main_correlations(board)],
        changes=changes,
        first_flips=_first_flips(changes) if changes else [],
        answers=answers,
        graded=bool(answers) and any(grade is not None for *_, grade in answers["prompts"]),
        first_answers=_first_answers(answers) if answers else {},
        setup=setting_pairs(content.setup),
        made=made_table(content),
        items_by_task=items_by_task(content),
        prompts=sample_prompts(content),
        notes=content.notes,
    )


def _security_policy(style: str, scripts: Sequence[str]) -> str:
    """Return a content security policy that allows this style and these scripts, and nothing else."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"

    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(digest, scripts))}",
            f"style-src {digest(style)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _score_rows(content: PageContent) -> list[dict[str, Any]]:
    columns = [column for column in content.board.columns if column.main]
    addresses = {variant.run_id: variant.address for variant in content.variants}
    champion = content.decision.champion
    rows = []
    for row in content.board.rows:
        cells = []
        for column in columns:
            cell = row.cells.get(column.key)
            cells.append(
                {
                    "label": column.label,
                    "value": None if cell is None else cell.value,
                    "text": None if cell is None else score_text(cell, column, interval=True),
                    "moved": column.key == DELTA and row.accuracy_moved,
                }
            )
        rows.append(
            {
                "name": row.name,
                "method": row.method,
                "run_id": row.run_id,
                "address": addresses.get(row.run_id or "", ""),
                "front": row.on_front,
                "chosen": champion is not None and champion.name == row.name,
                "status": row.status,
                "reason": row.reason,
                "runtime": row.runtime,
                "cells": cells,
            }
        )
    return rows


def _verdicts(content: PageContent) -> list[dict[str, Any]]:
    outcomes = {outcome.candidate.name: outcome for outcome in content.decision.outcomes}
    found = []
    for variant in content.variants:
        outcome = outcomes.get(variant.name)
        found.append(
            {
                "verdict": variant.verdict,
                "passed": outcome is not None and outcome.passed,
                "failed": failed_reasons(outcome) if outcome is not None else [],
            }
        )
    return found


def _groups(content: PageContent) -> list[dict[str, Any]]:
    labels = {column.key: column.label for column in content.board.columns}
    return [
        {"label": labels[metric], "groups": groups}
        for metric, groups in content.board.groups.items()
        if metric in labels
    ]


def _first_flips(changes: Mapping[str, Any]) -> list[FlipRow]:
    """Return the changed answers in which the baseline was most confident, for readers without scripts."""
    by_variant = zip(changes["variants"], changes["changes"], strict=True)
    listed = [(name, *change) for name, own in by_variant for change in own]
    listed.sort(key=lambda found: -(changes["items"][found[1]][8] or -1.0))
    return [_flip_row(changes, *found) for found in listed[:_FIRST]]


def _flip_row(
    changes: Mapping[str, Any], name: str, place: int, kind: str, kl: float | None, side: Mapping[str, Any]
) -> FlipRow:
    item_id, task, category, _, prompt, options, gold, _, _, baseline = changes["items"][place]
    where = [name, changes["tasks"][task], None if category is None else changes["categories"][category], item_id]
    chooses = "choice" in baseline
    return FlipRow(
        question=prompt,
        summary=None,
        where=" · ".join(part for part in where if part is not None),
        gold=options[gold] if options and gold is not None else None,
        baseline=options[baseline["choice"]] if chooses else baseline.get("text"),
        variant=options[side["choice"]] if chooses else side.get("text"),
        kind=kind,
    )


def _first_answers(answers: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the first answers of the first variant, for readers without scripts."""
    name, own = next(iter(answers["variants"].items()))
    pairs = zip(answers["prompts"][:_FIRST], own, strict=False)
    return {name: [{"prompt": p[2], "baseline": p[3], "variant": text} for p, (text, _) in pairs]}
