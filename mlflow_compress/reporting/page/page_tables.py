"""Tables over variants: flips by category, changed answers that variants share, how alike they answer, how made."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import numpy as np

from mlflow_compress.decide.gates import DELTA, FLIPS
from mlflow_compress.decide.scoreboard import ScoreRow
from mlflow_compress.metrics.core.item_table import ItemTable
from mlflow_compress.metrics.core.metric_inputs import headline
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.headline import for_users
from mlflow_compress.reporting.page.page_content import PageContent, shared_changes, ties
from mlflow_compress.reporting.scoreboard_text import baseline_row, score_cell
from mlflow_compress.reporting.tables import Column, Table, Words
from mlflow_compress.reporting.verdict import slice_findings

LEVELS = 8
"""Shades of a heat map."""

MOST_PAIRED = 24
"""Most variants whose pairs are shown; the table of pairs grows with the square."""


@dataclass(frozen=True, kw_only=True)
class SharedChanges:
    """Changed answers that variants share."""

    variants: Sequence[str]  # Those of the table of pairs; the closest ones where there are more than `MOST_PAIRED`
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
    rows: list[Sequence[str | Words | None]] = [baseline_row(board, heads)] if board.baseline_cells else []
    strong = set()
    for row in board.rows:
        chosen = champion is not None and champion.name == row.name
        if chosen:
            strong.add(len(rows))
        name = _variant(row, addresses.get(row.run_id or "", ""), chosen=chosen)
        rows.append((name, *(score_cell(row, column, interval=True) for column in main)))
    return Table(columns=[Column("variant", left=True, key="name"), *heads], rows=rows, strong=frozenset(strong))


def _variant(row: ScoreRow, address: str, *, chosen: bool) -> Words:
    notes = [Words("the choice", style="choice")] if chosen else []
    notes.append(Words(row.method, style="method"))
    notes += [Words(f"run {row.run_id[:8]}", address=address)] if row.run_id else []
    failed = ": ".join(text for text in (row.status.replace("finished", ""), row.reason) if text)
    notes += [Words(failed, style="worse")] if failed else []
    notes += [Words(f"timed in {row.runtime}")] if row.runtime else []
    return Words(row.name, notes, sign="*" if row.on_front else "", value=row.name)


def verdicts_table(content: PageContent) -> Table:
    """Return each variant in one sentence, and what the policy says of it."""
    outcomes = {outcome.candidate.name: outcome for outcome in content.decision.outcomes}
    said = [outcomes.get(variant.name) for variant in content.variants]
    return Table(
        columns=[Column("in one sentence", long=True), Column(content.policy, long=True)],
        rows=[
            (
                Words(variant.verdict, [Words(users)] if (users := for_users(headline(list(variant.results)))) else []),
                None
                if outcome is None
                else Words("passes", style="better")
                if outcome.passed
                else Words(f"fails: {'; '.join(outcome.failed)}", style="same"),
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
            said = score_cell(row, delta, interval=True)
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


def ties_table(content: PageContent) -> Table:
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


def flips_by_part(content: PageContent) -> dict[tuple[str, str | None], dict[str, MetricResult]]:
    """Return the flips of every variant by task and category, in their order; a part without any value is left out."""
    parts: dict[tuple[str, str | None], dict[str, MetricResult]] = {}
    for variant in content.variants:
        for result in variant.results:
            if result.name == FLIPS and result.task is not None:
                parts.setdefault((result.task, result.category), {})[variant.name] = result
    return dict(sorted(parts.items(), key=lambda part: (part[0][0], part[0][1] or "")))


def heat_map(content: PageContent, *, intervals: bool = True) -> Table:
    """Return the flips by task and category in percent, shaded."""
    parts = flips_by_part(content)
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
    first = {v.name: found[0] for v in content.variants if (found := slice_findings(v.results))}
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


def alike_table(content: PageContent) -> Table | None:
    """Return the similarity of the models' answers; None where no judge stage embedded them.

    The weakest shade is the smallest similarity of the table, the strongest is 1.
    """
    models = content.similarity
    if models is None:
        return None
    shown = models.values[:MOST_PAIRED, :MOST_PAIRED]
    room = 1.0 - float(shown.min()) if models.shares is not None else 0.0
    cells = [["1" if i == j else f"{x:.4f}" for j, x in enumerate(row)] for i, row in enumerate(shown.tolist())]
    levels = [[_level(room - (1.0 - value), room) for value in row] for row in shown.tolist()]
    return _pairs("similarity", models.names[:MOST_PAIRED], cells, levels)


def shared_table(content: PageContent) -> SharedChanges | None:
    """Return which changed answers variants share; None without two variants that have items."""
    changes = content.changes
    if content.items is None or len(changes) < 2:
        return None
    view = ItemTable(content.items)
    together, by_count = shared_changes(changes, len(content.items))
    n = min(len(changes), MOST_PAIRED)
    return SharedChanges(
        variants=list(changes)[:n],
        together=together[:n, :n].tolist(),
        by_count=by_count,
        n_variants=len(changes),
        n_items=int(np.isin(view.family, view.graded).sum()),
    )


def made_table(content: PageContent) -> Table:
    """Return the settings of every variant; a cell is empty where its method has no such setting."""
    names = list(dict.fromkeys(name for variant in content.variants for name in variant.settings))
    return Table(
        columns=[Column(name.replace("_", " "), left=True) for name in ("variant", *names)],
        rows=[
            (Words(v.name, [v.run_id], address=v.address), *(v.settings.get(name, "") for name in names))
            for v in content.variants
        ],
    )


def items_by_task(content: PageContent) -> Table:
    """Return the number of items of each task."""
    columns = [] if content.items is None else [content.items.column(name).tolist() for name in ("task", "family")]
    counts = sorted(Counter(zip(*columns, strict=True)).items())
    return Table.of([{"task": task, "family": family.replace("_", " "), "items": n} for (task, family), n in counts])
