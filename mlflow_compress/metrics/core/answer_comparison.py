"""Compares two models by their answers: from records or from prediction files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.core.answer_files import Answer, check_same_questions
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.stats.intervals import paired_difference, wilson
from mlflow_compress.metrics.stats.significance import holm
from mlflow_compress.metrics.stats.transitions import Flips, count_flips
from mlflow_compress.records import RunRecords


def _summary(found: Flips, *, level: float, n_unscored: int) -> dict[str, Any]:
    n, n_variant = found.n, found.n_correct + found.w2c - found.c2w
    percent = [100.0 * bound for bound in wilson(found.c2w + found.w2c, n, level=level)]
    all_flips = found.all_flips
    return {
        "n": n,
        "accuracy_baseline": found.n_correct / n,
        "accuracy_variant": n_variant / n,
        "accuracy_delta": found.accuracy_delta,
        "c2w": found.c2w,
        "w2c": found.w2c,
        "w2w": found.w2w,
        "flips_pct": 100.0 * found.flips,
        "all_flips_pct": None if all_flips is None else 100.0 * all_flips,
        "mcnemar_p": found.mcnemar_p,
        "n_unscored": n_unscored,
        "level": level,
        "accuracy_baseline_interval": list(wilson(found.n_correct, n, level=level)),
        "accuracy_variant_interval": list(wilson(n_variant, n, level=level)),
        "accuracy_delta_interval": list(paired_difference(found.w2c, found.c2w, n, level=level)),
        "flips_pct_interval": percent,
        "all_flips_pct_interval": None
        if found.w2w is None
        else [100.0 * bound for bound in wilson(found.c2w + found.w2c + found.w2w, n, level=level)],
    }


def compare_answers(baseline: Sequence[Answer], variant: Sequence[Answer], *, level: float = 0.95) -> dict[str, Any]:
    """Return the flips family, both accuracies, McNemar's p and intervals; ready for JSON.

    Keys: `n, accuracy_baseline, accuracy_variant, accuracy_delta` (shares), `c2w, w2c, w2w` (counts), `flips_pct,
    all_flips_pct` (percent), `mcnemar_p`, `n_unscored`, `level`, `..._interval` of each, and `rule` where the files say
    how answers were scored. `w2w` and `all_flips_pct` are None for generated answers: two wrong texts are nearly always
    different.

    Raises
    ------
    AlignmentError
        When ids, golds, questions, prompts or scoring rules differ.
    """
    check_same_questions(baseline, variant)
    other = {a.id: a for a in variant}
    pairs = [(a, other[a.id]) for a in baseline]
    scored = [(a, b) for a, b in pairs if a.pred is not None and b.pred is not None]
    if not scored:
        raise DataError("No item has an answer of both models")
    # Whether answers of any type are equal is asked of themselves, never of numpy, which would cast them.
    moved = [a.pred != b.pred for a, b in scored]
    chosen = not any(a.generated or b.generated for a, b in scored)
    found = count_flips(
        [a.is_correct for a, _ in scored],
        [b.is_correct for _, b in scored],
        np.zeros(len(scored), dtype=bool) if chosen else None,
        moved if chosen else None,
    )
    rules = sorted({a.rule for a in baseline if a.rule is not None})
    return {**_summary(found, level=level, n_unscored=len(pairs) - len(scored)), "rule": ", ".join(rules) or None}


def compare_records(baseline: RunRecords, variant: RunRecords, *, level: float = 0.95) -> dict[str, Any]:
    """Return the same from two runs' records, pooled over multiple choice, and for each task under `tasks`.

    Where no task is multiple choice, the pooled values are over all answered items and without `w2w`. Every task also
    has `mcnemar_p_holm`, its p-value after Holm's correction for the number of tasks.
    """
    inputs = MetricInputs(baseline, variant)
    reason = inputs.missing("predictions")
    if reason is not None:
        raise DataError("The records cannot be compared", got=reason)
    view = inputs.view

    def counted(rows: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, Any] | None:
        both = rows[inputs.scored_by_both[rows]]
        if not len(both):
            return None
        b, q = inputs.baseline_predictions, inputs.variant_predictions
        answers = (b.content[both, 0], q.content[both, 0]) if view.chooses[both].all() else (None, None)
        found = count_flips(b.correct[both, 0], q.correct[both, 0], *answers)
        return _summary(found, level=level, n_unscored=len(rows) - len(both))

    whole = counted(np.flatnonzero(np.isin(view.family, inputs.headline_families)))
    if whole is None:
        raise DataError("No item has a prediction of both models")
    tasks = {s.task: counted(s.rows) for s in inputs.subsets(view.graded, categories=())}
    found = {task: summary for task, summary in tasks.items() if summary is not None}
    adjusted = holm([summary["mcnemar_p"] for summary in found.values()])
    for summary, p in zip(found.values(), adjusted, strict=True):
        summary["mcnemar_p_holm"] = float(p)
    return {**whole, "tasks": found}
