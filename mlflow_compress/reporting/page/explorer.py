"""The changed answers of all variants, laid out for the page's explorer: every text once, probabilities as integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.special import softmax

from mlflow_compress.metrics.core.item_table import ItemTable
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.stats.arrays import Float, Int
from mlflow_compress.records import Generations, Items, RunRecords
from mlflow_compress.reporting.record_tables import ChangedAnswers, changed_answers

READ = ("items", "option_scores", "option_distances", "generations")
"""The records that changed answers are read from."""


@dataclass(frozen=True, eq=False, kw_only=True)
class VariantChanges:
    """What one variant changed; every list has one entry per changed answer.

    Attributes
    ----------
    changed : ChangedAnswers
        Which items, in which direction. Rows are those of the baseline's items.
    answers : list of dict
        The variant's side, as `_answers_of` describes it.
    baseline : list of dict
        The baseline's side of the same items.
    """

    changed: ChangedAnswers
    answers: list[dict[str, Any]]
    baseline: list[dict[str, Any]]


def changes_of(baseline: RunRecords, variant: RunRecords) -> VariantChanges:
    """Return what a variant changed. They share an evaluation id, and so the baseline's items."""
    inputs = MetricInputs(baseline=baseline, variant=RunRecords(**{**vars(variant), "items": baseline.items}))
    changed = changed_answers(inputs)
    return VariantChanges(
        changed=changed,
        answers=_answers_of(inputs, "variant", changed.rows),
        baseline=_answers_of(inputs, "baseline", changed.rows),
    )


def _answers_of(inputs: MetricInputs, which: str, rows: Int) -> list[dict[str, Any]]:
    """Return what one model answered to each item.

    `p` has the probability of each option in thousandths, in the items' own order of options (an item that asks for one
    word has the probability of that word); `choice` is the chosen option; `text` is a generated answer.
    """
    if not len(rows):
        return []
    records = inputs.baseline if which == "baseline" else inputs.variant
    predictions = inputs.baseline_predictions if which == "baseline" else inputs.variant_predictions
    found: list[dict[str, Any]] = [{} for _ in rows]
    scored = np.flatnonzero(inputs.view.n_options[rows] > 0)
    if len(scored):
        shares = _option_shares(inputs, which, rows[scored])
        for place, share in zip(scored, shares, strict=True):
            row = rows[place]
            found[place]["p"] = share[: inputs.view.n_options[row]].tolist()
            if inputs.view.chooses[row]:
                found[place]["choice"] = int(predictions.content[row, 0])
    if records is not None and records.generations is not None:
        texts = _texts(records.generations, inputs.view)
        for place, row in enumerate(rows):
            if inputs.view.n_options[row] == 0:
                found[place]["text"] = texts.get(int(row))
    return found


def _option_shares(inputs: MetricInputs, which: str, rows: Int) -> Int:
    grid = inputs.grid(which)
    chooses = inputs.view.chooses[rows]
    p: Float = np.exp(grid.loglik[rows, 0])
    if chooses.any():
        p[chooses] = softmax(grid.by_rule[rows[chooses], 0], axis=-1)
    ordered = np.zeros_like(p)  # an option that an item does not have stands at content 0 with the probability 0
    np.add.at(ordered, (np.arange(len(rows))[:, None], grid.content[rows, 0]), p)
    return np.rint(1000 * ordered).astype(np.int64)


def _texts(generations: Generations, view: ItemTable) -> dict[int, str | None]:
    """Return the first answer to each generated item, by the item's row."""
    first = generations.where(turn=0, sample=0, task=set(view.task[view.rule == "exact_match"]))
    return dict(zip(view.locate(first).tolist(), first.table.column("text").to_pylist(), strict=True))


def explorer_data(items: Items, variants: Mapping[str, VariantChanges], *, most: int | None = None) -> dict[str, Any]:
    """Return the changed answers of all variants as values for JSON.

    Parameters
    ----------
    items : Items
        The baseline's items.
    variants : mapping of str to VariantChanges
        By the variant's name.
    most : int, optional
        Changed answers to keep, those with the largest margin of the baseline; by default all.

    Returns
    -------
    dict
        `total` and `shown` count changed answers. `tasks`, `categories` and `prefixes` are texts that items share.
        An item is ``[id, task, category, prefix, rest of the prompt, options, gold, accepted answers, margin,
        baseline's side]``.
        A change is ``[item, kind, kl, variant's side]``, in `changes`, one list per variant.
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
    }


def _most_confident(variants: Mapping[str, VariantChanges], most: int | None) -> dict[str, Int]:
    """Return which changed answers of each variant are kept; the order within a variant stays."""
    total = sum(len(v.changed.rows) for v in variants.values())
    if most is None or total <= most:
        return {name: np.arange(len(v.changed.rows)) for name, v in variants.items()}
    margins = np.concatenate([np.nan_to_num(v.changed.margin, nan=-1.0) for v in variants.values()])
    kept = np.zeros(total, dtype=bool)
    kept[np.argsort(-margins, kind="stable")[:most]] = True
    ends = np.cumsum([len(v.changed.rows) for v in variants.values()])[:-1]
    return {name: np.flatnonzero(part) for name, part in zip(variants, np.split(kept, ends), strict=True)}


def _short(value: float) -> float | None:
    return float(f"{value:.3g}") if np.isfinite(value) else None


def _item_rows(items: Items, used: Int, baseline: Mapping[int, tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    rows = items.table.take(pa.array(used)).to_pylist()
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    categories = list(dict.fromkeys(row["category"] for row in rows if row["category"]))
    prefixes = _shared_beginnings(rows)
    codes = {text: code for code, text in enumerate(dict.fromkeys(prefixes.values()))}
    found = []
    for number, row in zip(used.tolist(), rows, strict=True):
        margin, side = baseline[number]
        prefix = prefixes[row["task"], row["category"]]
        found.append(
            [
                row["item_id"],
                tasks.index(row["task"]),
                categories.index(row["category"]) if row["category"] else None,
                codes[prefix],
                (row["prompt"] or row["question"] or "")[len(prefix) :],
                row["options"],
                row["gold"],
                row["answers"],
                _short(1000 * margin),
                side,
            ]
        )
    return {"tasks": tasks, "categories": categories, "prefixes": list(codes), "items": found}


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


def shared_changes(variants: Mapping[str, VariantChanges], n_items: int) -> tuple[Int, dict[int, int]]:
    """Return how many changed answers each pair of variants shares, and how many items k variants changed, by k.

    Returns
    -------
    together : numpy.ndarray of int, shape (n_variants, n_variants)
        Items that both variants changed; the diagonal has each variant's own.
    by_count : dict of int to int
        Number of items that exactly k variants changed, for every k above 0.
    """
    changed = np.zeros((len(variants), n_items), dtype=np.float32)  # floats, because numpy multiplies them fast
    for place, variant in enumerate(variants.values()):
        changed[place, variant.changed.rows] = 1.0
    counts = np.bincount(changed.sum(axis=0).astype(np.int64), minlength=len(variants) + 1)
    return (changed @ changed.T).astype(np.int64), {k: int(n) for k, n in enumerate(counts) if k > 0}
