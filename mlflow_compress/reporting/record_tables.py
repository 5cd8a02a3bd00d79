"""Tables and plot data from the records, for the report and the tracking UI."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.requirements import OPTION_DISTANCES
from mlflow_compress.metrics.margins import BinnedShare, share_by_bin
from mlflow_compress.metrics.stats.arrays import Bool, Float, Int
from mlflow_compress.metrics.stats.significance import Flips, count_flips


def _kl(inputs: MetricInputs) -> Float:
    if inputs.missing(OPTION_DISTANCES) is None:
        return inputs.distance("kl")
    return np.full(len(inputs.view), np.nan)


@dataclass(frozen=True, eq=False)
class ChangedAnswers:
    """The items whose answer changed, most confident baseline first."""

    rows: Int  # Rows of the items; shape (n_changed,)
    kinds: tuple[str, ...]  # "c2w" (right to wrong), "w2c" (wrong to right) or "w2w" (wrong to another wrong answer)
    margin: Float  # The baseline's margin and the item's KL in nats; NaN where an item has none; shape (n_changed,)
    kl: Float


def changed_answers(inputs: MetricInputs) -> ChangedAnswers:
    """Return the items whose answer the variant changed; none where there are corpora alone."""
    if inputs.baseline.items is None:
        return ChangedAnswers(np.empty(0, dtype=np.int64), (), np.empty(0), np.empty(0))
    view = inputs.view
    b, q = inputs.baseline_predictions, inputs.variant_predictions
    right_b, right_q = b.correct[:, 0], q.correct[:, 0]
    moved = view.chooses & ~right_b & ~right_q & (b.content[:, 0] != q.content[:, 0])
    changed = inputs.scored_by_both & np.isin(view.family, view.graded) & ((right_b != right_q) | moved)
    margin, kl = b.margin[:, 0], _kl(inputs)
    rows = np.flatnonzero(changed)
    rows = rows[np.argsort(-np.nan_to_num(margin[rows], nan=-1.0), kind="stable")]
    kinds = tuple("c2w" if right_b[row] else "w2c" if right_q[row] else "w2w" for row in rows)
    return ChangedAnswers(rows, kinds, margin[rows], kl[rows])


def flips_table(inputs: MetricInputs) -> list[dict[str, Any]]:
    """Return one row per item whose answer changed, sorted by the baseline's confidence, highest first.

    Columns: `task, item_id, category, question, options, gold, baseline, variant, kind, margin_baseline, kl`. `gold`,
    `baseline` and `variant` are option texts (None for generated answers), `kind` is "c2w", "w2c" or "w2w",
    `margin_baseline` and `kl` are None if they do not exist.
    """
    changed = changed_answers(inputs)
    if not len(changed.rows):
        return []
    view, b, q = inputs.view, inputs.baseline_predictions, inputs.variant_predictions
    table = view.items.table.take(changed.rows).to_pylist()
    found = []
    for row, item, kind, margin, kl in zip(changed.rows, table, changed.kinds, changed.margin, changed.kl, strict=True):
        options = list(item["options"] or [])
        chooses = bool(view.chooses[row])
        found.append(
            {
                "task": item["task"],
                "item_id": item["item_id"],
                "category": item["category"],
                "question": item["question"],
                "options": options,
                "gold": options[item["gold"]] if chooses else None,
                "baseline": options[b.content[row, 0]] if chooses else None,
                "variant": options[q.content[row, 0]] if chooses else None,
                "kind": kind,
                "margin_baseline": float(margin) if np.isfinite(margin) else None,
                "kl": float(kl) if np.isfinite(kl) else None,
            }
        )
    return found


def _choice_rows(inputs: MetricInputs) -> tuple[Float, Bool, Bool]:
    if inputs.baseline.items is None:
        return np.empty(0), np.empty(0, bool), np.empty(0, bool)
    b, q = inputs.baseline_predictions, inputs.variant_predictions
    rows = inputs.scored_by_both & np.isin(inputs.view.family, inputs.view.choice) & np.isfinite(b.margin[:, 0])
    changed = b.content[rows, 0] != q.content[rows, 0]
    return b.margin[rows, 0], changed, ~b.correct[rows, 0]


def change_by_margin(inputs: MetricInputs) -> BinnedShare | None:
    """Return P(answer changed) by bin of the baseline's top margin (figure 3); None without choice items."""
    margin, changed, _ = _choice_rows(inputs)
    return share_by_bin(margin, changed, level=inputs.settings.level) if len(margin) else None


def incorrect_by_margin(inputs: MetricInputs) -> BinnedShare | None:
    """Return P(baseline incorrect) by bin of its top margin (figure 4); None without choice items."""
    margin, _, wrong = _choice_rows(inputs)
    return share_by_bin(margin, wrong, level=inputs.settings.level) if len(margin) else None


def kl_values(inputs: MetricInputs) -> Float:
    """Return the KL of every multiple-choice item in nats, shape (n_scored,), for a histogram; empty without any."""
    if inputs.baseline.items is None:
        return np.empty(0)
    kl = _kl(inputs)[np.isin(inputs.view.family, inputs.view.choice)]
    return np.asarray(kl[np.isfinite(kl)], dtype=np.float64)


def token_kl_values(inputs: MetricInputs) -> Float:
    """Return the KL of every corpus token in nats, in record order; empty without corpus records."""
    if inputs.variant is None or inputs.variant.token_distances is None:
        return np.empty(0)
    return np.asarray(inputs.variant.token_distances.column("kl"), dtype=np.float64)


def flips_by_category(inputs: MetricInputs) -> dict[tuple[str, str], Flips]:
    """Return the transition counts of every (task, category) of the multiple-choice tasks."""
    if inputs.baseline.items is None:
        return {}
    b, q = inputs.baseline_predictions, inputs.variant_predictions
    found = {}
    for subset in inputs.subsets(inputs.view.choice, categories=inputs.view.choice):
        rows = subset.rows[inputs.scored_by_both[subset.rows]]
        if subset.task is not None and subset.category is not None and len(rows):
            found[subset.task, subset.category] = count_flips(
                b.correct[rows, 0], q.correct[rows, 0], b.content[rows, 0], q.content[rows, 0]
            )
    return found
