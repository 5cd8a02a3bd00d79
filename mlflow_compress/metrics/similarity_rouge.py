"""Correlation of ConSCompF similarity with ROUGE-L over instructions."""

from __future__ import annotations

import numpy as np

from mlflow_compress.metrics.conscompf import similarity
from mlflow_compress.metrics.core.item_table import ItemSubset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, MetricKey, metric
from mlflow_compress.metrics.core.requirements import EMBEDDINGS, GENERATIONS, VARIANT, package
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.metrics.stats.correlation import correlate
from mlflow_compress.metrics.text import answer_pairs, rouge_l
from mlflow_compress.records import MetricResult


def _rouge_differences(inputs: MetricInputs) -> dict[str, float]:
    """Return ``1 - ROUGE-L`` of the models' first answers to each instruction, mean over samples, by item id."""
    pairs, given = answer_pairs(inputs), inputs.embeddings
    if pairs is None or given is None:
        return {}
    scores = rouge_l(pairs.references, pairs.texts)
    first = (pairs.turn == 0) & (pairs.task == given.task)
    return {str(i): 1.0 - float(scores[first & (pairs.item_id == i)].mean()) for i in np.unique(pairs.item_id[first])}


def _key(name: str, what: str) -> MetricKey:
    return MetricKey(
        name=f"judge/similarity_rouge_{name}",
        direction="neither",
        low=-1.0,
        high=1.0,
        unit="correlation",
        meaning=f"{what} correlation of similarity (equation 4) and 1 - ROUGE-L over instructions.",
    )


@METRICS.register("similarity_rouge")
@metric(
    keys=(_key("pearson", "Pearson"), _key("spearman", "Spearman")),
    requires=(VARIANT, EMBEDDINGS, GENERATIONS, package("rouge_score"), package("rapidfuzz")),
    source="ConSCompF, correlation with ROUGE-L differences, here between the two models' own answers",
)
def similarity_rouge(inputs: MetricInputs) -> list[MetricResult]:
    """Over instructions that have both: near -1 where the two agree; nothing where either does not vary.

    The paper takes the difference of two models' ROUGE-L against reference answers, over pairs of models. For one
    variant the difference is ``1 - ROUGE-L`` of variant against baseline, which needs no reference. Pearson's interval
    is a bootstrap over instructions, Spearman's Bonett and Wright's.
    """
    given, s = inputs.embeddings, inputs.settings
    differences = _rouge_differences(inputs)
    if given is None or given.variant is None:
        return []
    rows = np.array([row for row, i in enumerate(given.item_ids) if i in differences], dtype=np.int64)
    if not len(rows):
        return []
    x: Float = similarity(given.baseline, given.variant).per_instruction("equation4")[rows]
    y = np.array([differences[given.item_ids[row]] for row in rows])
    subset = ItemSubset(None, None, np.arange(len(given.item_ids)))
    results = []
    for name, found in correlate(x, y, level=s.level, resamples=s.resamples, seed=s.seed, method=s.method).items():
        if found is not None:
            left = len(given.item_ids) - len(rows)
            results.append(
                subset.result(
                    f"judge/similarity_rouge_{name}",
                    found.value,
                    found.interval,
                    n=found.n,
                    level=s.level,
                    n_unscored=left,
                )
            )
    return results
