"""The page over variants as one HTML file that loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mlflow_compress.reporting.html import changes_table, settings_table
from mlflow_compress.reporting.page.page_content import PageContent, page_data
from mlflow_compress.reporting.page.page_tables import (
    LEVELS,
    alike_table,
    flips_by_part,
    heat_map,
    items_by_task,
    made_table,
    scores_table,
    shared_table,
    ties_table,
    verdicts_table,
)
from mlflow_compress.reporting.page.page_text import choice_reason, choice_sentence, sample_prompts
from mlflow_compress.reporting.scoreboard_text import correlation_text, finding, legend, main_correlations
from mlflow_compress.reporting.tables import TEMPLATES, Column, Table, policy_hash

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
        scores=scores_table(content),
        legend=[line.replace("*", "★", 1) for line in legend(board)],
        verdicts=verdicts_table(content),
        groups=ties_table(content),
        heat=heat_map(content, intervals=intervals),
        heat_intervals=intervals,
        shared=shared_table(content),
        alike=alike_table(content),
        similarity=content.similarity,
        correlations=[correlation_text(board, found) for found in main_correlations(board)],
        changes=changes,
        first_flips=_first_flips(changes) if changes else None,
        answers=answers,
        graded=bool(answers) and any(grade is not None for *_, grade in answers["prompts"]),
        first_answers=_first_answers(answers) if answers else None,
        setup=settings_table(content.setup),
        made=made_table(content),
        items_by_task=items_by_task(content),
        prompts=sample_prompts(content),
        notes=content.notes,
    )


def _security_policy(style: str, scripts: Sequence[str]) -> str:
    """Return a content security policy that allows this style and these scripts, and nothing else."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(policy_hash, scripts))}",
            f"style-src {policy_hash(style)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _first_flips(changes: Mapping[str, Any]) -> Table:
    """Return the changed answers in which the baseline was most confident, for readers without scripts."""
    by_variant = zip(changes["variants"], changes["changes"], strict=True)
    listed = [(name, *change) for name, own in by_variant for change in own]
    listed.sort(key=lambda found: -(changes["items"][found[1]][8] or -1.0))
    return changes_table([_flip(changes, *found) for found in listed[:_FIRST]])


def _flip(
    changes: Mapping[str, Any], name: str, place: int, kind: str, kl: float | None, side: Mapping[str, Any]
) -> dict[str, Any]:
    item_id, task, category, _, prompt, options, gold, _, _, baseline = changes["items"][place]
    chooses = "choice" in baseline
    return {
        "model": name,
        "task": changes["tasks"][task],
        "category": None if category is None else changes["categories"][category],
        "item_id": item_id,
        "question": prompt,
        "gold": options[gold] if options and gold is not None else None,
        "baseline": options[baseline["choice"]] if chooses else baseline.get("text"),
        "variant": options[side["choice"]] if chooses else side.get("text"),
        "kind": kind,
    }


def _first_answers(answers: Mapping[str, Any]) -> Table:
    """Return the first answers of the first variant, for readers without scripts."""
    pairs = zip(answers["prompts"][:_FIRST], next(iter(answers["variants"].values())), strict=False)
    return Table(
        columns=[Column(head, long=True) for head in ("instruction", "baseline's answer", "variant's answer")],
        rows=[(prompt[2], prompt[3], text) for prompt, (text, _) in pairs],
    )
