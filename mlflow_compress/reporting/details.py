"""Details behind the headline values: noise floor, KL distribution, conformal sets, corpora, corrected tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from mlflow_compress.metrics.core.confidence_bins import BinnedMean, kl_by_confidence, token_kl_by_confidence
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.requirements import ITEMS, OPTION_SCORES, TOKEN_DISTANCES, TOKEN_SCORES, family
from mlflow_compress.metrics.core.token_groups import matched
from mlflow_compress.metrics.noise import noise_table
from mlflow_compress.metrics.perplexity import statistics
from mlflow_compress.metrics.stats.arrays import Float, Int
from mlflow_compress.metrics.stats.conformal import SCORES, Score, conformal, coverage_by_class, repeated_splits, split
from mlflow_compress.metrics.stats.corpus_statistics import difference_shape, percentiles
from mlflow_compress.metrics.stats.significance import adjusted_mcnemar
from mlflow_compress.metrics.uncertainty import (
    DONT_KNOW,
    NONE_OF_THESE,
    models_of,
    scored_rows,
    six_probabilities,
)
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.record_tables import kl_values

LETTERS = "ABCDEF"


def conformal_table(inputs: MetricInputs, *, n_splits: int = 100) -> list[dict[str, Any]]:
    """Return one row per six-option task (prompt method), model and score; empty without such tasks.

    Columns: `task, model, score, n, threshold` (None where it is infinite), `accuracy, set_size, coverage, uacc`,
    `coverage_by_class` (by the gold letter), `dont_know_pct, none_of_these_pct` (of the test items) on the seeded
    split. `splits` has mean and central interval of UAcc, set size and coverage over `n_splits` random splits. It shows
    how much a value depends on the split. The mean of a model's `uacc` is the pooled `uncertainty/uacc`.
    """
    if inputs.missing(family("lettered_six"), OPTION_SCORES):
        return []
    table = []
    for subset in inputs.view.subsets(("lettered_six",), categories=()):
        rows = scored_rows(inputs, subset)
        if len(rows) < 2:
            continue
        gold = inputs.view.gold[rows]
        for model in models_of(inputs):
            p = six_probabilities(inputs, model, rows)
            for score in SCORES:
                row = {"task": subset.task, "model": model, "score": score}
                table.append({**row, **_conformal_row(inputs, p, gold, score, n_splits)})
    return table


def _conformal_row(inputs: MetricInputs, p: Float, gold: Int, score: Score, n_splits: int) -> dict[str, Any]:
    s = inputs.settings
    calibration, test = split(len(gold), seed=s.split_seed, calibration_share=s.calibration_share)
    found = conformal(p, gold, calibration=calibration, test=test, score=score, alpha=s.alpha)
    answers = p[test].argmax(axis=1)
    runs = repeated_splits(
        p,
        gold,
        score,
        n_splits=n_splits,
        seed=s.split_seed,
        alpha=s.alpha,
        calibration_share=s.calibration_share,
    )
    tails = [(1 - s.level) / 2, (1 + s.level) / 2]
    return {
        "n": len(test),
        "threshold": found.threshold if math.isfinite(found.threshold) else None,
        "accuracy": found.accuracy,
        "set_size": found.set_size,
        "coverage": found.coverage,
        "uacc": found.uacc,
        "coverage_by_class": {LETTERS[c]: share for c, share in coverage_by_class(found, gold[test]).items()},
        "dont_know_pct": 100.0 * float((answers == DONT_KNOW).mean()),
        "none_of_these_pct": 100.0 * float((answers == NONE_OF_THESE).mean()),
        "splits": {
            name: {"mean": float(values.mean()), "interval": [float(x) for x in np.quantile(values, tails)]}
            for name, values in runs.items()
        },
    }


def corpus_table(inputs: MetricInputs) -> list[dict[str, Any]]:
    """Return llama.cpp's statistics of each corpus, and the distribution of its log-likelihood differences.

    One row per corpus, columns as in `CorpusStatistics` (an estimate is [value, uncertainty]) plus `differences` as in
    `DifferenceShape`; empty without corpus records of both models.
    """
    if inputs.missing(TOKEN_SCORES, TOKEN_DISTANCES) or inputs.variant is None:
        return []
    base, variant, distances = (
        inputs.baseline.token_scores,
        inputs.variant.token_scores,
        inputs.variant.token_distances,
    )
    assert base is not None and variant is not None and distances is not None  # not missing
    table = []
    for task in sorted(set(base.table.column("task").unique().to_pylist())):
        b, q, d = base.where(task=task), variant.where(task=task), distances.where(task=task)
        found = asdict(statistics(b, q, d))
        for name in ("kl_percentiles", "dp_percentiles"):
            found[name] = {f"{100 * level:g}": value for level, value in found[name].items()}
        shape = asdict(difference_shape(b.column("nll"), matched(b, q, "nll")))
        lists = {name: shape[name].tolist() for name in ("edges", "counts")}
        table.append({"task": task, **found, "differences": {**shape, **lists}})
    return table


def _bins(found: BinnedMean | None) -> list[dict[str, float | None]]:
    columns = asdict(found) if found is not None else {}
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    return [{n: None if x != x else x for n, x in zip(columns, row, strict=True)} for row in rows]


def divergence_table(inputs: MetricInputs) -> dict[str, Any]:
    """Return the distribution of the KL: percentiles over choice items, and means by the baseline's confidence.

    `item_percentiles` (nats, by percent), `by_margin` (choice items by the baseline's top margin), `by_probability`
    (corpus tokens by the baseline's probability of the target). The last two are rows with `left, right, n, mean, low,
    high`. A part without records is empty.
    """
    kl = kl_values(inputs) if inputs.missing(ITEMS) is None else np.empty(0)
    has_items = len(kl) > 0 and inputs.missing(OPTION_SCORES) is None
    return {
        "item_percentiles": {f"{100 * level:g}": x for level, x in percentiles(kl).items()} if len(kl) else {},
        "by_margin": _bins(kl_by_confidence(inputs) if has_items else None),
        "by_probability": _bins(token_kl_by_confidence(inputs)),
    }


def details(inputs: MetricInputs, results: Sequence[MetricResult]) -> dict[str, Any]:
    """Return the details of one evaluation, as values that JSON can store.

    `noise_floor`, `divergence`, `conformal` and `corpus` are the tables of this module and of `noise`;
    `mcnemar_p_holm` are the p-values of the accuracy change per task, with Holm's correction.
    """
    return {
        "noise_floor": noise_table(inputs, results),
        "divergence": divergence_table(inputs),
        "conformal": conformal_table(inputs),
        "corpus": corpus_table(inputs),
        "mcnemar_p_holm": {task: p for (_, task), p in adjusted_mcnemar({"": results}).items()},
    }
