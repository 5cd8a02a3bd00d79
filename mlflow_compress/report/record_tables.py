"""Tables and plot data from the evidence: what the report and the tracking UI show beside the numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlflow_compress.metrics.core.item_table import ANSWERED, CHOICE
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.flips import Flips, count_flips
from mlflow_compress.metrics.margins import BinnedShare, share_by_bin
from mlflow_compress.metrics.stats.arrays import Bool, Float


def _kl(evidence: MetricInputs) -> Float:
    if evidence.missing("option_distances") is None:
        return evidence.distance("kl")
    return np.full(len(evidence.view), np.nan)


def flips_table(evidence: MetricInputs) -> list[dict[str, Any]]:
    """Return one row for each item whose answer changed, most confident baseline first.

    Columns: `task, item_id, category, question, options, gold, baseline, variant, kind, margin_baseline, kl`. `gold`,
    `baseline` and `variant` are option texts (None for generated answers), `kind` is "c2w", "w2c" or "w2w",
    `margin_baseline` and `kl` are None where they do not exist.
    """
    if evidence.baseline.items is None:  # corpora alone
        return []
    view = evidence.view
    b, q = evidence.baseline_predictions, evidence.variant_predictions
    right_b, right_q = b.correct[:, 0], q.correct[:, 0]
    moved = view.chooses & ~right_b & ~right_q & (b.content[:, 0] != q.content[:, 0])
    changed = evidence.scored_by_both & np.isin(view.family, ANSWERED) & ((right_b != right_q) | moved)
    margin, kl = b.margin[:, 0], _kl(evidence)
    rows = np.flatnonzero(changed)
    rows = rows[np.argsort(-np.nan_to_num(margin[rows], nan=-1.0), kind="stable")]
    table = view.items.table.take(rows).to_pylist()
    found = []
    for row, item in zip(rows, table, strict=True):
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
                "kind": "c2w" if right_b[row] else "w2c" if right_q[row] else "w2w",
                "margin_baseline": float(margin[row]) if np.isfinite(margin[row]) else None,
                "kl": float(kl[row]) if np.isfinite(kl[row]) else None,
            }
        )
    return found


def _choice_rows(evidence: MetricInputs) -> tuple[Float, Bool, Bool]:
    if evidence.baseline.items is None:
        return np.empty(0), np.empty(0, bool), np.empty(0, bool)
    b, q = evidence.baseline_predictions, evidence.variant_predictions
    rows = evidence.scored_by_both & np.isin(evidence.view.family, CHOICE) & np.isfinite(b.margin[:, 0])
    changed = b.content[rows, 0] != q.content[rows, 0]
    return b.margin[rows, 0], changed, ~b.correct[rows, 0]


def change_by_margin(evidence: MetricInputs) -> BinnedShare | None:
    """Return P(answer changed) by bin of the baseline's top margin (figure 3); None without choice items."""
    margin, changed, _ = _choice_rows(evidence)
    return share_by_bin(margin, changed, level=evidence.settings.level) if len(margin) else None


def incorrect_by_margin(evidence: MetricInputs) -> BinnedShare | None:
    """Return P(baseline incorrect) by bin of its top margin (figure 4); None without choice items."""
    margin, _, wrong = _choice_rows(evidence)
    return share_by_bin(margin, wrong, level=evidence.settings.level) if len(margin) else None


def kl_values(evidence: MetricInputs) -> Float:
    """Return the KL of every multiple-choice item in nats, shape (n_scored,), for a histogram; empty without any."""
    if evidence.baseline.items is None:
        return np.empty(0)
    kl = _kl(evidence)[np.isin(evidence.view.family, CHOICE)]
    return np.asarray(kl[np.isfinite(kl)], dtype=np.float64)


def token_kl_values(evidence: MetricInputs) -> Float:
    """Return the KL of every corpus token in nats, in record order; empty without corpus records."""
    if evidence.variant is None or evidence.variant.token_distances is None:
        return np.empty(0)
    return np.asarray(evidence.variant.token_distances.column("kl"), dtype=np.float64)


def flips_by_category(evidence: MetricInputs) -> dict[tuple[str, str], Flips]:
    """Return the transition counts of every (task, category) of the multiple-choice tasks."""
    if evidence.baseline.items is None:
        return {}
    b, q = evidence.baseline_predictions, evidence.variant_predictions
    found = {}
    for part in evidence.parts(CHOICE, categories=CHOICE):
        rows = part.rows[evidence.scored_by_both[part.rows]]
        if part.task is not None and part.category is not None and len(rows):
            found[part.task, part.category] = count_flips(
                b.correct[rows, 0], q.correct[rows, 0], b.content[rows, 0], q.content[rows, 0]
            )
    return found
