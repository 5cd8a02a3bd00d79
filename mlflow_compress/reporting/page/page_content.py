"""What the page over variants shows, before it becomes HTML, Markdown, CSV or JSON."""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.special import softmax

from mlflow_compress.decide.promotion import Decision
from mlflow_compress.decide.scoreboard import Scoreboard, ScoreColumn
from mlflow_compress.metrics.conscompf import ModelSimilarity
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.stats.arrays import Float, Int
from mlflow_compress.reasoning import COMPARISONS
from mlflow_compress.records import Generations, Items, Judgments, MetricResult, RunRecords
from mlflow_compress.reporting.answers_page import AnswerKey, mean_grades
from mlflow_compress.reporting.details import ChangedAnswers, changed_answers, concluded, generated_texts
from mlflow_compress.reporting.numbers import scale_of
from mlflow_compress.reporting.thoughts import PartedThought


@dataclass(frozen=True, kw_only=True, eq=False)
class PageVariant:
    """One variant that has results."""

    name: str  # As in the scoreboard
    verdict: str  # What was found, in one sentence
    run_id: str  # Its main run, and the address that shows it in the MLflow that people share; empty without one
    address: str
    results: Sequence[MetricResult] = ()  # Every result, also by task and category
    # How it was made: the parameters in which variants differ
    settings: Mapping[str, str] = field(default_factory=dict)
    changes: "_VariantChanges | None" = None  # Its changed answers; None where the evaluation has corpora only
    # What it answered to the instructions; None where no judge stage ran on the instructions of the page
    answers: Generations | None = None
    grades: Judgments | None = None  # A judge's grades of these answers


@dataclass(frozen=True, kw_only=True, eq=False)
class PageContent:
    """Everything that the page shows."""

    board: Scoreboard  # The variants side by side, and which of them can be told apart
    decision: Decision  # What a promotion policy says; nothing is promoted
    policy: str  # The policy in words: "the default policy"
    objective: str  # What the policy ranks by
    # Sentences beside the choice: ends that hold for all, what it is tied with, why no smaller one was taken
    beside: Sequence[str] = ()
    gates: Sequence[str]  # Its gates in words
    variants: Sequence[PageVariant]  # In the order of the scoreboard
    items: Items | None = None  # The baseline's items; None where the evaluation has corpora only
    answers: Generations | None = None  # What the baseline answered to the instructions
    grades: Judgments | None = None  # A judge's grades of these answers
    # How similar the answers of baseline and variants are; None where no judge stage embedded them
    similarity: ModelSimilarity | None = None
    # Questions with a thought of which much of the probability of being right moved
    thoughts: Sequence[PartedThought] = ()
    setup: Mapping[str, Any] = field(default_factory=dict)  # How it was measured; values may be nested
    notes: Sequence[str] = ()  # What the page leaves out, and why

    @property
    def title(self) -> str:
        n = len(self.board.rows)
        return f"{n} {'variant' if n == 1 else 'variants'} of {self.board.baseline}"

    @property
    def changes(self) -> "dict[str, _VariantChanges]":
        """The changed answers of the variants that have any items, by name."""
        return {v.name: v.changes for v in self.variants if v.changes is not None}


@dataclass(frozen=True, eq=False, kw_only=True)
class _VariantChanges:
    """What one variant changed; every list has one entry per changed answer."""

    changed: ChangedAnswers  # Which items, in which direction. Rows are those of the baseline's items.
    answers: list[dict[str, Any]]  # The variant's side, as `_answers_of` describes it
    baseline: list[dict[str, Any]]  # The baseline's side of the same items
    unscored: Int  # Rows of the items that it, or the baseline, has no answer to; they are no changes


def changes_of(baseline: RunRecords, variant: RunRecords) -> _VariantChanges:
    """Return what a variant changed. They share an evaluation id, and so the baseline's items."""
    inputs = MetricInputs(baseline=baseline, variant=RunRecords(**{**vars(variant), "items": baseline.items}))
    changed = changed_answers(inputs)
    return _VariantChanges(
        changed=changed,
        answers=_answers_of(inputs, "variant", changed.rows),
        baseline=_answers_of(inputs, "baseline", changed.rows),
        unscored=np.flatnonzero(~inputs.scored_by_both),
    )


def _answers_of(inputs: MetricInputs, which: str, rows: Int) -> list[dict[str, Any]]:
    """Return what one model answered to each item.

    `p` has the probability of each option in thousandths, in the items' own order of options (an item that asks for one
    word has the probability of that word); `choice` is the chosen option; `text` is a generated answer, and `concluded`
    what it concludes behind its thought.
    """
    if not len(rows):
        return []
    records = inputs.baseline if which == "baseline" else inputs.variant
    predictions = inputs.baseline_predictions if which == "baseline" else inputs.variant_predictions
    answers: list[dict[str, Any]] = [{} for _ in rows]
    scored = np.flatnonzero(inputs.view.n_options[rows] > 0)
    if len(scored):
        grid, with_options = inputs.grid(which), rows[scored]
        chooses = inputs.view.chooses[with_options]
        p: Float = np.exp(grid.loglik[with_options, 0])
        if chooses.any():
            p[chooses] = softmax(grid.by_rule[with_options[chooses], 0], axis=-1)
        ordered = np.zeros_like(p)  # an option that an item does not have stands at content 0 with the probability 0
        np.add.at(ordered, (np.arange(len(with_options))[:, None], grid.content[with_options, 0]), p)
        shares = np.rint(1000 * ordered).astype(np.int64)
        for place, share in zip(scored, shares, strict=True):
            row = rows[place]
            answers[place]["p"] = share[: inputs.view.n_options[row]].tolist()
            if inputs.view.chooses[row]:
                answers[place]["choice"] = int(predictions.content[row, 0])
    if records is not None and records.generations is not None:
        view, texts, prompts = inputs.view, generated_texts(records), inputs.view.items.table.column("prompt")
        for place, row in enumerate(rows):
            if view.n_options[row] == 0:
                text = texts.get((view.task[row], view.item_id[row]))
                answers[place]["text"] = text
                if view.rule[row] in COMPARISONS:
                    answers[place]["concluded"] = concluded(prompts[int(row)].as_py(), text, view.rule[row])
    return answers


def explorer_data(items: Items, variants: Mapping[str, _VariantChanges], *, most: int | None = None) -> dict[str, Any]:
    """Return the changed answers of all variants as values for JSON; of too many those with the largest margins.

    An item is ``[id, task, category, prefix, rest of the prompt, options, gold, accepted answers, margin, baseline's
    side]``, with numbers of texts in `tasks`, `categories` and `prefixes`. A change is ``[item, kind, kl, variant's
    side]``. `changes` and `unscored`, the items without an answer, have one list per variant.
    """
    keep = _most_confident(variants, most)
    used = np.unique(np.concatenate([np.empty(0, np.int64), *(v.changed.rows[keep[n]] for n, v in variants.items())]))
    place = {int(row): index for index, row in enumerate(used)}
    baseline: dict[int, tuple[float, dict[str, Any]]] = {}
    changes = []
    for name, variant in variants.items():
        listed = []
        for i in keep[name]:
            row = int(variant.changed.rows[i])
            baseline.setdefault(row, (float(variant.changed.margin[i]), variant.baseline[i]))
            listed.append([place[row], variant.changed.kinds[i], _short(variant.changed.kl[i]), variant.answers[i]])
        changes.append(listed)
    return {
        "total": sum(len(v.changed.rows) for v in variants.values()),
        "shown": sum(map(len, changes)),
        "variants": list(variants),
        **_item_rows(items, used, baseline),
        "changes": changes,
        "unscored": [[place[row] for row in v.unscored.tolist() if row in place] for v in variants.values()],
    }


def _most_confident(variants: Mapping[str, _VariantChanges], most: int | None) -> dict[str, Int]:
    """Return which changed answers of each variant are kept; the order within a variant stays."""
    total = sum(len(v.changed.rows) for v in variants.values())
    if most is None or total <= most:
        return {name: np.arange(len(v.changed.rows)) for name, v in variants.items()}
    rows = np.concatenate([v.changed.rows for v in variants.values()])
    margins = np.concatenate([np.nan_to_num(v.changed.margin, nan=-1.0) for v in variants.values()])
    order = np.lexsort((rows, -margins))
    shown = np.zeros(total, dtype=bool)
    shown[order[:most]] = True
    shown &= rows != rows[order[most]]  # an item of which some variants' changes are left out would tell them apart
    ends = np.cumsum([len(v.changed.rows) for v in variants.values()])[:-1]
    return {name: np.flatnonzero(part) for name, part in zip(variants, np.split(shown, ends), strict=True)}


def _short(value: float) -> float | None:
    return float(f"{value:.3g}") if np.isfinite(value) else None


def _item_rows(items: Items, used: Int, baseline: Mapping[int, tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    rows = items.table.take(pa.array(used)).to_pylist()
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    categories = list(dict.fromkeys(row["category"] for row in rows if row["category"]))
    prefixes = _shared_beginnings(rows)
    codes = {text: code for code, text in enumerate(dict.fromkeys(prefixes.values()))}
    listed = []
    for number, row in zip(used.tolist(), rows, strict=True):
        margin, side = baseline[number]
        prefix = prefixes[row["task"], row["category"]]
        listed.append(
            [
                row["item_id"],
                tasks.index(row["task"]),
                categories.index(row["category"]) if row["category"] else None,
                codes[prefix],
                (row["prompt"] or row["question"] or "")[len(prefix) :],
                row["options"],
                row["gold"],
                row["answers"][:1] if row["rule"] in COMPARISONS else row["answers"],  # not the token limit
                _short(1000 * margin),
                side,
            ]
        )
    return {"tasks": tasks, "categories": categories, "prefixes": list(codes), "items": listed}


def _shared_beginnings(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str | None], str]:
    """Return what the prompts of a task's category begin with: its few-shot examples, which fill most of the prompt."""
    groups: dict[tuple[str, str | None], list[str]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["category"]), []).append(row["prompt"] or row["question"] or "")
    shared = {}
    for group, prompts in groups.items():
        # What the first and the last in the alphabet share, all share. A part that is only begun is the item's own.
        first, last = min(prompts), max(prompts)
        n = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
        end = first.rfind("\n\n", 0, n)
        shared[group] = first[: end + 2] if end >= 0 else ""
    return shared


def shared_changes(variants: Mapping[str, _VariantChanges], n_items: int) -> tuple[Int, dict[int, int]]:
    """Return how many items both of each pair of variants changed (on the diagonal one alone), and how many k, by k."""
    changed = np.zeros((len(variants), n_items), dtype=np.float32)  # floats, because numpy multiplies them fast
    for place, variant in enumerate(variants.values()):
        changed[place, variant.changed.rows] = 1.0
    counts = np.bincount(changed.sum(axis=0).astype(np.int64), minlength=len(variants) + 1)
    return (changed @ changed.T).astype(np.int64), {k: int(n) for k, n in enumerate(counts) if k > 0}


_MOST_CHARACTERS = 4_000_000
"""Most characters of variants' answers on a page; the rest stays in the runs, and the page says how many."""


def _answer_data(content: PageContent) -> dict[str, Any] | None:
    """Return the answers as values for JSON; None where there are none.

    `prompts` is one ``[id, turn, prompt, baseline's answer, baseline's grade]`` per answered turn, `variants` one
    ``[answer, grade]`` per prompt, by name. A grade is the mean over repeats. `total` counts those left out too.
    """
    answered = [v for v in content.variants if v.answers is not None]
    if content.answers is None or not answered:
        return None
    baseline, grades = content.answers.first_samples(), _grades(content.grades)
    prompts = content.answers.first_samples("prompt")
    texts = {v.name: (v.answers.first_samples(), _grades(v.grades)) for v in answered if v.answers is not None}
    shown: list[AnswerKey] = []
    used = 0
    for key in baseline:
        used += sum(len(by_key.get(key) or "") for by_key, _ in texts.values())
        if shown and used > _MOST_CHARACTERS:
            break
        shown.append(key)
    return {
        "total": len(baseline),
        "prompts": [[*key, prompts[key], baseline[key], grades.get(key)] for key in shown],
        "variants": {name: [[by_key.get(k), graded.get(k)] for k in shown] for name, (by_key, graded) in texts.items()},
    }


def _grades(judgments: Judgments | None) -> dict[AnswerKey, float]:
    """Return the grades of the only judge model; several are told apart in each run's report."""
    return {key: by_judge[""] for key, by_judge in mean_grades(judgments).items() if "" in by_judge}


# Of 14,042 items with prompts of MMLU's length and 8 variants (benchmarks/page.py), the changed answers take 2.2 MB in
# this form, and 2.0 MB as Parquet with zstd. For the second, a page needs a reader of Parquet and of zstd, some 100 kB.
# For the first, every browser has one: DecompressionStream, which works from disk and in a sandbox too.

_MOST_BYTES = 4_000_000
"""Largest size of the embedded data; script, style and tables fit into the rest of 5 MB."""


def packed(value: Any) -> str:
    """Return a value as base64 text of compressed JSON. It has no character that HTML reads as markup."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode("ascii")


def page_data(content: PageContent, *, most_bytes: int = _MOST_BYTES) -> tuple[str, dict[str, Any]]:
    """Return the page's data as text, and as values; too many changed answers lose those with the smallest margins."""
    data: dict[str, Any] = {
        "scores": _score_data(content),
        "answers": _answer_data(content),
        "alike": _map_data(content),
    }
    most: int | None = None
    while True:
        changes = explorer_data(content.items, content.changes, most=most) if content.items is not None else None
        text = packed({**data, "changes": changes})
        if len(text) <= most_bytes or changes is None or changes["shown"] == 0:
            return text, {**data, "changes": changes}
        most = int(changes["shown"] * min(0.95 * most_bytes / len(text), 0.9))


def _map_data(content: PageContent) -> dict[str, Any] | None:
    """Return the models as points: how alike they answer; None where nothing tells them apart."""
    models = content.similarity
    if models is None or models.shares is None:
        return None
    points = [
        {"name": name, "x": x, "y": y, "alike": alike}
        for name, (x, y), alike in zip(
            models.names, models.coordinates.tolist(), models.values[0].tolist(), strict=True
        )
    ]
    return {"points": points, "shares": models.shares}


def _score_data(content: PageContent) -> dict[str, Any]:
    """Return what the figures draw: columns, values with intervals, and the groups that cannot be told apart."""
    board = content.board
    return {
        "columns": [_axis(column) for column in board.columns],
        "distance": board.distance,
        "rows": [
            {
                "name": row.name,
                "method": row.method,
                "front": row.on_front,
                "harm": row.harm and {"word": row.harm.word, "text": row.harm.text, "margin": row.harm.margin},
                "cells": {key: [cell.value, cell.low, cell.high] for key, cell in row.cells.items()},
            }
            for row in board.finished
        ],
        "groups": {metric: [list(group) for group in groups] for metric, groups in board.groups.items()},
        "ties": [list(pair) for pair in ties(board)],
        "level": board.level,
    }


def ties(board: Scoreboard) -> list[tuple[str, str]]:
    """Return the pairs of variants that neither the KL nor the right answers tell apart."""
    return [(p.first, p.second) for p in board.separations if p.tied]


def _axis(column: ScoreColumn) -> dict[str, Any]:
    """Return a column as an axis: values times `factor` have the unit `suffix`."""
    units = {"bytes": (1e-6, "MB"), "times": (1.0, ""), "bits": (1.0, "bits"), "seconds": (1.0, "s")}
    scale = scale_of(column.unit)
    unit = scale.difference_suffix if column.is_difference else scale.suffix
    factor, suffix = units.get(column.unit, (scale.factor, unit.strip()))
    return {
        "key": column.key,
        "label": column.label,
        "direction": column.direction,
        "factor": factor,
        "suffix": suffix,
    }
