"""The page over variants: as one HTML file that loads nothing, as Markdown for a pull request, and as JSON values."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
from markupsafe import Markup

from mlflow_compress.decide.gates import DECODE_SPEEDUP, DELTA, FLIPS, KL, MEMORY_RATIO, RATIO, DivergenceGate, Gate
from mlflow_compress.decide.scoreboard import Scoreboard, ScoreColumn, ScoreRow
from mlflow_compress.metrics.core.item_table import ItemTable
from mlflow_compress.metrics.core.metric_inputs import headline
from mlflow_compress.metrics.kl_tail import CLIPPED_KL
from mlflow_compress.metrics.thinking import PASS_DELTA
from mlflow_compress.metrics.thought_length import COST_RATIO
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting import scoreboard_text
from mlflow_compress.reporting.headline import for_users
from mlflow_compress.reporting.html import changes_table, settings_table
from mlflow_compress.reporting.page.page_content import PageContent, page_data, shared_changes, ties
from mlflow_compress.reporting.tables import LEVELS, TEMPLATES, Column, Table, Words, escape_markdown, policy_hash
from mlflow_compress.reporting.verdict import slice_findings

_MOST_PAIRED = 24
"""Most variants whose pairs are shown; the table of pairs grows with the square."""


@dataclass(frozen=True, kw_only=True)
class _SharedChanges:
    """Changed answers that variants share."""

    variants: Sequence[str]  # Those of the table of pairs; the closest ones where there are more than `_MOST_PAIRED`
    together: Sequence[Sequence[int]]  # Items that both variants changed; the diagonal has each variant's own
    by_count: Mapping[int, int]  # Number of items that exactly k variants changed, by k; over all variants
    n_variants: int  # Variants, and items whose answers are right or wrong, that these numbers are from
    n_items: int

    @property
    def table(self) -> Table:
        """The pairs, shaded by the share of the row's changed answers that the column's variant changed too."""
        levels = [[_level(value, row[i]) for value in row] for i, row in enumerate(self.together)]
        return _pairs("changed by both", self.variants, self.together, levels)


def scores_table(content: PageContent) -> Table:
    """Return the main columns of the baseline and every variant; the choice stands out."""
    board, champion = content.board, content.decision.champion
    main = [column for column in board.columns if column.main]
    heads = [Column(column.label, key=column.key, direction=column.direction) for column in main]
    addresses = {variant.run_id: variant.address for variant in content.variants}
    rows: list[Sequence[str | Words | None]] = (
        [scoreboard_text.baseline_row(board, heads)] if board.baseline_cells else []
    )
    strong = set()
    for row in board.rows:
        chosen = champion is not None and champion.name == row.name
        if chosen:
            strong.add(len(rows))
        on_front = row.name in scoreboard_text.shown_front(board)
        name = _variant(row, addresses.get(row.run_id or "", ""), chosen=chosen, on_front=on_front)
        rows.append((name, *(scoreboard_text.score_cell(row, column, interval=True) for column in main)))
    return Table(columns=[Column("variant", left=True, key="name"), *heads], rows=rows, strong=frozenset(strong))


def _variant(row: ScoreRow, address: str, *, chosen: bool, on_front: bool) -> Words:
    notes = [Words("the choice", style="choice")] if chosen else []
    notes.append(Words(row.method, style="method"))
    notes += [Words(f"run {row.run_id[:8]}", address=address)] if row.run_id else []
    failed = ": ".join(text for text in (row.status.replace("finished", ""), row.reason) if text)
    notes += [Words(failed, style="worse")] if failed else []
    notes += [Words(f"timed in {row.runtime}")] if row.runtime else []
    return Words(row.name, notes, sign="*" if on_front else "", value=row.name)


def _verdicts_table(content: PageContent) -> Table:
    """Return each variant in one sentence, and what the policy says of it."""
    outcomes = {outcome.candidate.name: outcome for outcome in content.decision.outcomes}
    said = [outcomes.get(variant.name) for variant in content.variants]
    return Table(
        columns=[Column("in one sentence", long=True), Column(content.policy, long=True)],
        rows=[
            (
                Words(variant.verdict, [Words(users)] if (users := for_users(headline(variant.results))) else []),
                None
                if outcome is None
                else Words(
                    outcome.answer.text(),
                    [] if outcome.passed else list(map(Words, outcome.failed)),
                    style="better" if outcome.passed else "same",
                ),
            )
            for variant, outcome in zip(content.variants, said, strict=True)
        ],
    )


def direction_table(content: PageContent) -> Table:
    """Return how many answers each variant broke and repaired, what that shows, and with which variants it is tied."""
    board = content.board
    delta = next((column for column in board.columns if column.key == DELTA), None)
    tied: dict[str, list[str]] = {row.name: [] for row in board.rows}
    for first, second in ties(board):
        tied[first].append(second)
        tied[second].append(first)
    rows = []
    for row in board.finished:
        if row.harm is not None and delta is not None:
            change, flips = 100 * row.cells[DELTA].value, row.cells[FLIPS].value
            halves = (f"{max(0.0, flips + sign * change) / 2:.2f}" for sign in (-1, 1))
            said = scoreboard_text.score_cell(row, delta, interval=True)
            rows.append((row.name, *halves, said, row.harm.text, ", ".join(tied[row.name]) or None))
    return Table(
        columns=[
            Column("variant", left=True),
            Column("right → wrong, %"),
            Column("wrong → right, %"),
            Column("accuracy difference"),
            Column("verdict", long=True),
            Column("tied with", long=True),
        ],
        rows=rows,
    )


def _ties_table(content: PageContent) -> Table:
    """Return the variants that cannot be told apart, one group per line."""
    labels = {column.key: column.label for column in content.board.columns}
    return Table(
        columns=[Column("", left=True), Column("", long=True)],
        rows=[
            (labels[metric], "\n".join(map(" · ".join, groups)) or "every pair can be told apart")
            for metric, groups in content.board.groups.items()
            if metric in labels
        ],
    )


def _flips_by_part(content: PageContent) -> dict[tuple[str, str | None], dict[str, MetricResult]]:
    """Return the flips of every variant by task and category, in their order; a part without any value is left out."""
    parts: dict[tuple[str, str | None], dict[str, MetricResult]] = {}
    for variant in content.variants:
        for result in variant.results:
            if result.name == FLIPS and result.task is not None:
                parts.setdefault((result.task, result.category), {})[variant.name] = result
    return dict(sorted(parts.items(), key=lambda part: (part[0][0], part[0][1] or "")))


def heat_map(content: PageContent, *, intervals: bool = True) -> Table:
    """Return the flips by task and category in percent, shaded."""
    parts = _flips_by_part(content)
    highest = max((r.value for by_variant in parts.values() for r in by_variant.values()), default=0.0)
    names = [variant.name for variant in content.variants]
    return Table(
        columns=[Column("flips, %", left=True), Column("items"), *map(Column, names)],
        rows=[
            (
                _part(task, category),
                max(result.n for result in by_variant.values()),
                *(_percent(by_variant.get(name), intervals) for name in names),
            )
            for (task, category), by_variant in parts.items()
        ],
        strong=frozenset(i for i, (_, category) in enumerate(parts) if category is None),
        shades=[[None, *(_level(f[n].value, highest) if n in f else None for n in names)] for f in parts.values()],
    )


def worst_slices(content: PageContent) -> Table:
    """Return of each variant the slice with the smallest corrected p-value of "moves more than the others"."""
    first = {v.name: findings[0] for v in content.variants if (findings := slice_findings(v.results))}
    return Table(
        columns=[Column("variant", left=True), Column("slice that moves most", long=True)],
        rows=[(name, Words(one.text, [f"corrected p {one.result.p:.2g}"])) for name, one in first.items()],
    )


def _part(task: str, category: str | None) -> Words:
    """Return the name of a part; its value is the part as the fragment of the explorer of changed answers has it."""
    fields = {"task": task} if category is None else {"task": task, "category": category}
    return Words(task if category is None else f"{task}: {category}", value=urlencode(fields))


def _percent(result: MetricResult | None, interval: bool) -> str | None:
    if result is None:
        return None
    bounds = "" if result.low is None or result.high is None else f" [{result.low:.1f}, {result.high:.1f}]"
    return f"{result.value:.1f}{bounds if interval else ''}"


def _level(value: float, highest: float) -> int:
    return round(LEVELS * value / highest) if highest > 0 else 0


def _pairs(head: str, names: Sequence[str], cells: Sequence[Sequence[Any]], levels: Sequence[Sequence[int]]) -> Table:
    rows = [(name, *row) for name, row in zip(names, cells, strict=True)]
    return Table(columns=[Column(head, left=True), *map(Column, names)], rows=rows, shades=levels)


def _alike_table(content: PageContent) -> Table | None:
    """Return the similarity of the models' answers, the smallest with the weakest shade; None without embeddings."""
    models = content.similarity
    if models is None:
        return None
    shown = models.values[:_MOST_PAIRED, :_MOST_PAIRED]
    room = 1.0 - float(shown.min()) if models.shares is not None else 0.0
    cells = [["1" if i == j else f"{x:.4f}" for j, x in enumerate(row)] for i, row in enumerate(shown.tolist())]
    levels = [[_level(room - (1.0 - value), room) for value in row] for row in shown.tolist()]
    return _pairs("similarity", models.names[:_MOST_PAIRED], cells, levels)


def shared_table(content: PageContent) -> _SharedChanges | None:
    """Return which changed answers variants share; None without two variants that have items."""
    changes = content.changes
    if content.items is None or len(changes) < 2:
        return None
    view = ItemTable(content.items)
    together, by_count = shared_changes(changes, len(content.items))
    n = min(len(changes), _MOST_PAIRED)
    return _SharedChanges(
        variants=list(changes)[:n],
        together=together[:n, :n].tolist(),
        by_count=by_count,
        n_variants=len(changes),
        n_items=int(np.isin(view.family, view.graded).sum()),
    )


def _made_table(content: PageContent) -> Table:
    """Return the settings of every variant; a cell is empty where its method has no such setting."""
    names = list(dict.fromkeys(name for variant in content.variants for name in variant.settings))
    return Table(
        columns=[Column(name.replace("_", " "), left=True) for name in ("variant", *names)],
        rows=[
            (Words(v.name, [v.run_id], address=v.address), *(v.settings.get(name, "") for name in names))
            for v in content.variants
        ],
    )


def _items_by_task(content: PageContent) -> Table:
    """Return the number of items of each task."""
    columns = [] if content.items is None else [content.items.column(name).tolist() for name in ("task", "family")]
    counts = sorted(Counter(zip(*columns, strict=True)).items())
    return Table.of([{"task": task, "family": family.replace("_", " "), "items": n} for (task, family), n in counts])


_HERE = Path(__file__).parent
_MOST_WARNINGS = 6
_FIRST = 20  # changed answers, and answers, of the page without scripts
_MOST_HEAT_INTERVALS = 2_000  # cells; more would be no figure


def render_page(content: PageContent) -> str:
    """Return the page over variants as one HTML text, which loads nothing and runs only its own scripts.

    What models wrote is escaped in the tables and compressed in the data, so that nothing in it can be read as markup.
    """
    data, values = page_data(content)
    changes, answers = values["changes"], values["answers"]
    style = TEMPLATES.get_template("report.css").render()
    style += TEMPLATES.get_template("page.css.j2").render()
    libraries = (_HERE / "vendor" / "libraries.min.js").read_text(encoding="utf-8")
    script = "".join(path.read_text(encoding="utf-8") for path in sorted((_HERE / "scripts").glob("*.js")))
    board = content.board
    intervals = len(_flips_by_part(content)) * len(content.variants) <= _MOST_HEAT_INTERVALS

    security = [
        "default-src 'none'",
        f"script-src {' '.join(map(policy_hash, [libraries, script]))}",
        f"style-src {policy_hash(style)}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]

    return TEMPLATES.get_template("page.html.j2").render(
        content=content,
        security="; ".join(security),
        style=Markup(style),
        libraries=Markup(libraries),
        script=Markup(script),
        data=data,
        choice=choice_sentence(content),
        reason=choice_reason(content),
        most_warnings=_MOST_WARNINGS,
        finding=scoreboard_text.finding(board),
        interval=f"{100 * board.level:g} %",
        scores=scores_table(content),
        legend=[line.replace("*", "★", 1) for line in scoreboard_text.legend(board)],
        verdicts=_verdicts_table(content),
        direction=direction_table(content),
        margin=next((row.harm.margin for row in board.rows if row.harm is not None), None),
        groups=_ties_table(content),
        heat=heat_map(content, intervals=intervals),
        heat_intervals=intervals,
        slices=worst_slices(content),
        front=scoreboard_text.shown_front(board),
        shared=shared_table(content),
        alike=_alike_table(content),
        correlations=scoreboard_text.correlation_texts(board),
        changes=changes,
        first_flips=_first_flips(changes) if changes else None,
        answers=answers,
        graded=bool(answers) and any(grade is not None for *_, grade in answers["prompts"]),
        first_answers=_first_answers(answers) if answers else None,
        setup=settings_table(content.setup),
        made=_made_table(content),
        items_by_task=_items_by_task(content),
        prompts=sample_prompts(content),
    )


def _first_flips(changes: Mapping[str, Any]) -> Table:
    """Return the changed answers in which the baseline was most confident, for readers without scripts."""
    by_variant = zip(changes["variants"], changes["changes"], strict=True)
    listed = [(name, *change) for name, of_variant in by_variant for change in of_variant]
    listed.sort(key=lambda flip: -(changes["items"][flip[1]][8] or -1.0))
    flips = []
    for name, place, kind, _, side in listed[:_FIRST]:
        item_id, task, category, _, prompt, options, gold, accepted, _, baseline = changes["items"][place]
        chooses = "choice" in baseline
        shown = "concluded" if "concluded" in baseline else "text"
        flips.append(
            {
                "model": name,
                "task": changes["tasks"][task],
                "category": None if category is None else changes["categories"][category],
                "item_id": item_id,
                "question": prompt,
                "gold": options[gold] if options and gold is not None else " / ".join(accepted or []) or None,
                "baseline": options[baseline["choice"]] if chooses else baseline.get(shown),
                "variant": options[side["choice"]] if chooses else side.get(shown),
                "kind": kind,
            }
        )
    return changes_table(flips)


def _first_answers(answers: Mapping[str, Any]) -> Table:
    """Return the first answers of the first variant, for readers without scripts."""
    pairs = zip(answers["prompts"][:_FIRST], next(iter(answers["variants"].values())), strict=False)
    return Table(
        columns=[Column(head, long=True) for head in ("instruction", "baseline's answer", "variant's answer")],
        rows=[(prompt[2], prompt[3], text) for prompt, (text, _) in pairs],
    )


_TOLD = {
    FLIPS: "{} of answers flipped",
    KL: "KL {}",
    RATIO: "{} smaller",
    DECODE_SPEEDUP: "decodes at {} the baseline's speed",
    MEMORY_RATIO: "{} its peak memory",
    PASS_DELTA.name: "right answers {}",
    COST_RATIO.name: "{} as many tokens to a right answer",
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
        answer = outcomes[name].answer
        return f"{which}, {name}, {'is ' if answer.word == 'open' else ''}{answer.text()}."
    n, passing = len(decision.outcomes), sum(outcome.passed for outcome in decision.outcomes)
    if n == 1:
        return f"It passes {content.policy}."
    if passing == 1:
        return f"It is the only one of {n} variants that passes {content.policy}."
    which = f"All {n} variants pass" if passing == n else f"{passing} of {n} variants pass"
    return f"{which} {content.policy}; it is {_BEST[content.objective]} of them."


def choice_and_reason(content: PageContent) -> str:
    """Return the choice and why."""
    return f"{choice_sentence(content)} {choice_reason(content)}".rstrip()


def _values(board: Scoreboard, name: str) -> str:
    row = next(row for row in board.rows if row.name == name)
    columns: dict[str, ScoreColumn] = {column.key: column for column in board.columns}
    told = [
        (words if key != KL or CLIPPED_KL.name not in row.cells else "clipped KL {}").format(
            scoreboard_text.score_text(row, columns[key], interval=True)
        )
        for key, words in _TOLD.items()
        if key in row.cells and key in columns
    ]
    return ", ".join([*told, *([f"accuracy {row.harm.text}"] if row.harm is not None else [])])


def gate_texts(gates: Sequence[Gate | DivergenceGate]) -> list[str]:
    """Return each gate in words."""
    return [
        f"{gate.label} at {'least' if gate.at_least else 'most'} {gate.bound:g}"
        if isinstance(gate, Gate)
        else f"KL clipped per item (upper end) at most {gate.max_kl:g} nats"
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


_MOST_COLUMNS = 12
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
    if len(content.variants) <= _MOST_COLUMNS:
        heat, shared = heat_map(content), shared_table(content)
        slices = worst_slices(content)
        parts += [table.markdown() for table in (heat, slices) if table.rows]
        parts += [shared.table.markdown()] if shared is not None else []
    setup = settings_table(content.setup)
    parts.append(f"<details><summary>How it was measured</summary>\n\n{setup.markdown()}\n\n</details>")
    return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


def content_values(content: PageContent) -> dict[str, Any]:
    """Return every table of the page as plain values, ready for JSON."""
    shared, made = shared_table(content), _made_table(content)
    alike, counts = content.similarity, _items_by_task(content).rows
    shared_changes = (
        None
        if shared is None
        else {
            "variants": shared.variants,
            "together": shared.together,
            "items_changed_by_k_variants": shared.by_count,
            "items": shared.n_items,
        }
    )
    answer_similarity = (
        None
        if alike is None
        else {
            "models": alike.names,
            "values": alike.values.tolist(),
            "components": alike.coordinates.tolist(),
            "shares": alike.shares,
            "encoder": alike.encoder,
            "left_out": alike.left_out,
        }
    )

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
            for (task, category), flips in _flips_by_part(content).items()
        ],
        "worst_slices": [
            {"variant": v.name, "slice": findings[0].text, "p": findings[0].result.p}
            for v in content.variants
            if (findings := slice_findings(v.results))
        ],
        "shared_changes": shared_changes,
        "answer_similarity": answer_similarity,
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
        "thoughts": [asdict(thought) for thought in content.thoughts],
        "setup": dict(content.setup),
        "notes": list(content.notes),
    }
