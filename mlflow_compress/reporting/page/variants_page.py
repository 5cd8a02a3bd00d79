"""The page over variants: as one HTML file that loads nothing, as Markdown for a pull request, and as JSON values."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from mlflow_compress.decide.gates import DECODE_SPEEDUP, FLIPS, KL, MEMORY_RATIO, RATIO, DivergenceGate, Gate
from mlflow_compress.decide.scoreboard import Scoreboard, ScoreColumn
from mlflow_compress.metrics.core.item_table import ItemTable
from mlflow_compress.metrics.kl_tail import CLIPPED
from mlflow_compress.reporting import scoreboard_text
from mlflow_compress.reporting.html import changes_table, settings_table
from mlflow_compress.reporting.page import page_tables
from mlflow_compress.reporting.page.page_content import PageContent, page_data
from mlflow_compress.reporting.tables import TEMPLATES, Column, Table, escape_markdown, policy_hash
from mlflow_compress.reporting.verdict import slice_findings

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
    style = TEMPLATES.get_template("report.css").render()
    style += TEMPLATES.get_template("page.css.j2").render(levels=page_tables.LEVELS)
    libraries = (_HERE / "vendor" / "libraries.min.js").read_text(encoding="utf-8")
    script = "".join(path.read_text(encoding="utf-8") for path in sorted((_HERE / "scripts").glob("*.js")))
    board = content.board
    intervals = len(page_tables.flips_by_part(content)) * len(content.variants) <= _MOST_HEAT_INTERVALS
    return TEMPLATES.get_template("page.html.j2").render(
        content=content,
        security="; ".join(
            [
                "default-src 'none'",
                f"script-src {' '.join(map(policy_hash, [libraries, script]))}",
                f"style-src {policy_hash(style)}",
                "img-src data:",
                "base-uri 'none'",
                "form-action 'none'",
            ]
        ),
        style=Markup(style),
        libraries=Markup(libraries),
        script=Markup(script),
        data=data,
        choice=choice_sentence(content),
        reason=choice_reason(content),
        most_warnings=MOST_WARNINGS,
        finding=scoreboard_text.finding(board),
        interval=f"{100 * board.level:g} %",
        scores=page_tables.scores_table(content),
        legend=[line.replace("*", "★", 1) for line in scoreboard_text.legend(board)],
        verdicts=page_tables.verdicts_table(content),
        direction=page_tables.direction_table(content),
        margin=next((row.harm.margin for row in board.rows if row.harm is not None), None),
        groups=page_tables.ties_table(content),
        heat=page_tables.heat_map(content, intervals=intervals),
        heat_intervals=intervals,
        slices=page_tables.worst_slices(content),
        shared=page_tables.shared_table(content),
        alike=page_tables.alike_table(content),
        correlations=[
            scoreboard_text.correlation_text(board, correlation)
            for correlation in scoreboard_text.main_correlations(board)
        ],
        changes=changes,
        first_flips=_first_flips(changes) if changes else None,
        answers=answers,
        graded=bool(answers) and any(grade is not None for *_, grade in answers["prompts"]),
        first_answers=_first_answers(answers) if answers else None,
        setup=settings_table(content.setup),
        made=page_tables.made_table(content),
        items_by_task=page_tables.items_by_task(content),
        prompts=sample_prompts(content),
    )


def _first_flips(changes: Mapping[str, Any]) -> Table:
    """Return the changed answers in which the baseline was most confident, for readers without scripts."""
    by_variant = zip(changes["variants"], changes["changes"], strict=True)
    listed = [(name, *change) for name, of_variant in by_variant for change in of_variant]
    listed.sort(key=lambda flip: -(changes["items"][flip[1]][8] or -1.0))
    return changes_table([_flip(changes, *flip) for flip in listed[:_FIRST]])


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


_TOLD = {
    RATIO: "{} smaller",
    KL: "KL {}",
    FLIPS: "{} of answers flipped",
    DECODE_SPEEDUP: "decodes at {} the baseline's speed",
    MEMORY_RATIO: "{} its peak memory",
}
_BEST = {"size": "the smallest", "kl": "the closest", "speed": "the fastest", "utility": "the most useful"}


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
        outcomes = {outcome.candidate.name: outcome for outcome in decision.outcomes}
        closest = [row.name for row in content.board.rows if row.name in outcomes]  # they are sorted by closeness
        smaller = [name for name in closest if outcomes[name].candidate.compresses]
        which, name = "The closest to the baseline", closest[0]
        if smaller and smaller[0] != name:  # a control, which can never be shipped, says little about what can
            which, name = "The closest that is compressed", smaller[0]
        return f"{which}, {name}, fails: {'; '.join(outcomes[name].failed)}."
    n, passing = len(decision.outcomes), sum(outcome.passed for outcome in decision.outcomes)
    if n == 1:
        return f"It passes {content.policy}."
    if passing == 1:
        return f"It is the only one of {n} variants that passes {content.policy}."
    return f"It is {_BEST[content.objective]} of the {passing} variants, of {n}, that pass {content.policy}."


def choice_and_reason(content: PageContent) -> str:
    """Return the choice and why."""
    return f"{choice_sentence(content)} {choice_reason(content)}".rstrip()


def _values(board: Scoreboard, name: str) -> str:
    row = next(row for row in board.rows if row.name == name)
    columns: dict[str, ScoreColumn] = {column.key: column for column in board.columns}
    told = [
        (words if key != KL or CLIPPED.name not in row.cells else "clipped KL {}").format(
            scoreboard_text.score_text(row, columns[key], interval=True)
        )
        for key, words in _TOLD.items()
        if key in row.cells and key in columns
    ]
    return ", ".join([*([row.harm.text] if row.harm is not None else []), *told])


def gate_texts(gates: Sequence[Gate | DivergenceGate]) -> list[str]:
    """Return each gate in words."""
    return [
        f"{gate.label} at {'least' if gate.at_least else 'most'} {gate.bound:g}"
        if isinstance(gate, Gate)
        else f"KL (upper end) at most {gate.max_kl:g} nats"
        for gate in gates
    ]


def sample_prompts(content: PageContent) -> dict[str, str]:
    """Return the prompt of the first item of each task; of logged conversations none is shown."""
    if content.items is None:
        return {}
    logged = ItemTable(content.items).families(lambda family: family.logged)
    shown = content.items.table.filter(~np.isin(content.items.column("family"), logged))
    tasks = shown.column("task").to_pylist()
    first = {str(task): row for row, task in reversed(list(enumerate(tasks)))}
    prompts = shown.column("prompt")
    return {task: prompts[row].as_py() or "" for task, row in sorted(first.items())}


MOST_COLUMNS = 12
"""Most variants that a Markdown table has as columns."""


def page_markdown(content: PageContent) -> str:
    """Return the choice, the scoreboard, the groups, the flips by category and the set-up as Markdown."""
    labels = {column.key: column.label for column in content.board.columns}
    parts = [
        f"**{escape_markdown(choice_sentence(content))}** {escape_markdown(choice_reason(content))}",
        "\n".join(f"- {escape_markdown(sentence)}" for sentence in content.beside),
        scoreboard_text.scoreboard_markdown(content.board),
        "\n".join(
            f"- {escape_markdown(labels[metric])}: cannot be told apart: {escape_markdown(', '.join(group))}"
            for metric, groups in content.board.groups.items()
            for group in groups
        ),
    ]
    if len(content.variants) <= MOST_COLUMNS:
        heat, shared = page_tables.heat_map(content), page_tables.shared_table(content)
        slices = page_tables.worst_slices(content)
        parts += [table.markdown() for table in (heat, slices) if table.rows]
        parts += [shared.table.markdown()] if shared is not None else []
    setup = settings_table(content.setup)
    parts.append(f"<details><summary>How it was measured</summary>\n\n{setup.markdown()}\n\n</details>")
    return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


def content_values(content: PageContent) -> dict[str, Any]:
    """Return every table of the page as plain values, ready for JSON."""
    shared, made = page_tables.shared_table(content), page_tables.made_table(content)
    alike, counts = content.similarity, page_tables.items_by_task(content).rows
    return {
        "choice": choice_and_reason(content),
        "beside": list(content.beside),
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
                    for name, result in flips.items()
                },
            }
            for (task, category), flips in page_tables.flips_by_part(content).items()
        ],
        "worst_slices": [
            {"variant": v.name, "slice": found[0].text, "p": found[0].result.p}
            for v in content.variants
            if (found := slice_findings(v.results))
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
        "items_by_task": [dict(zip(("task", "family", "n"), row, strict=True)) for row in counts],
        "setup": dict(content.setup),
        "notes": list(content.notes),
    }
