"""Share of divergent tokens (SDT): how often the variant would take another token along the baseline's own answer."""

from __future__ import annotations

import numpy as np

from mlflow_compress.metrics.core.greedy_tokens import REQUIRES, SOURCE, forced_tokens
from mlflow_compress.metrics.core.item_table import ItemSubset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, MetricKey, metric
from mlflow_compress.metrics.stats.arrays import Float
from mlflow_compress.metrics.stats.bootstrap import bootstrap, cluster_sums
from mlflow_compress.records import MetricResult

FLOOR = MetricKey.percent(
    "judge/share_of_divergent_tokens_floor_pct",
    "neither",
    "The same share for the baseline on its own answers: near ties that rounding decides.",
    counted="tokens",
)
SDT = MetricKey.percent(
    "judge/share_of_divergent_tokens_pct",
    "lower",
    "Tokens of the baseline's greedy answers that are not the variant's most probable ones (SDT, teacher forcing).",
    label="Divergent tokens",
    headline=162,
    floor=FLOOR.name,
    counted="tokens",
)


def _percent(sums: Float) -> Float:
    return np.asarray(100.0 * sums[..., 0] / sums[..., -1], dtype=np.float64)


@METRICS.register("share_of_divergent_tokens")
@metric(keys=(SDT, FLOOR), requires=REQUIRES, source=f"{SOURCE}; under teacher forcing on the baseline's answer")
def share_of_divergent_tokens(inputs: MetricInputs) -> list[MetricResult]:
    """``SDT = 100 #{t : argmax q(. | prompt, x_<t) != x_t} / T`` on the baseline's greedy answers x, T tokens in all.

    One forward pass and no decoding. The first such token of an answer is its first divergent token, up to rounding.
    The interval is a bootstrap over answers.
    """
    found, s = forced_tokens(inputs), inputs.settings
    everything = ItemSubset(None, None, np.empty(0, dtype=np.int64))
    results = []
    for key, divergent in ((SDT, found.divergent), (FLOOR, found.divergent_baseline)):
        sums = cluster_sums(divergent, found.places.answer)
        interval = bootstrap(sums, _percent, resamples=s.resamples, level=s.level, seed=s.seed, method=s.method)
        value = float(_percent(sums.sum(axis=0)))
        results.append(everything.result(key.name, value, interval, n=len(divergent), level=s.level))
    return results
