"""Eq. 1 of the flips paper over the items: the divergences of both models' distributions, averaged as it says."""

from __future__ import annotations

import numpy as np

from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS, Direction, MetricKey, metric
from mlflow_compress.metrics.stats.bootstrap import bootstrap
from mlflow_compress.metrics.stats.studentized import studentized_interval
from mlflow_compress.records import MetricResult

LN2 = float(np.log(2.0))


def _key(name: str, direction: Direction, high: float, unit: str, meaning: str) -> MetricKey:
    return MetricKey(name=f"distance/{name}", direction=direction, low=0.0, high=high, unit=unit, meaning=meaning)


_COLUMNS = {
    "kl_mean": "kl",
    "kl_reverse_mean": "kl_reverse",
    "js_mean": "js",
    "acceptance": "tv",
    "top1_agreement": "same_top",
    "top10_agreement": "top10",
    "rbo10": "rbo10",
}
_SKEWED = ("kl_mean", "kl_reverse_mean", "js_mean")


@METRICS.register("divergence")
@metric(
    keys=(
        _key("kl_mean", "lower", np.inf, "nats", "KL(baseline || variant), eq. 1: items, then options, then tokens."),
        _key("kl_reverse_mean", "lower", np.inf, "nats", "KL(variant || baseline), weighted as eq. 1."),
        _key("js_mean", "lower", LN2, "nats", "Jensen-Shannon divergence, weighted as eq. 1."),
        _key("acceptance", "higher", 1.0, "share", "Expected acceptance rate 1 - TV, weighted as eq. 1."),
        _key("top1_agreement", "higher", 1.0, "share", "Share of tokens with the same most probable token."),
        _key("top10_agreement", "higher", 1.0, "share", "Share of the ten most probable tokens that both models have."),
        _key("rbo10", "higher", 1.0, "share", "Rank-biased overlap (p = 0.9) of the ten most probable tokens."),
    ),
    requires=("items", "variant", "option_distances"),
    source="Accuracy is Not All You Need, eq. 1; natural log, full vocabulary",
)
def divergence(inputs: MetricInputs) -> list[MetricResult]:
    """Mean over items of the mean over options of the mean over tokens; bootstrap over items.

    Divergences are skewed: their interval is the studentised bootstrap's.

    Lettered options of one token share a context, so that the mean over them is one divergence a question.
    """
    s = inputs.settings
    results = []
    scored_families = inputs.view.scored
    pooled = [family for family in inputs.headline_families if family in scored_families]
    for subset in inputs.subsets(scored_families, pooled=pooled):
        for name, column in _COLUMNS.items():
            if subset.category is not None and name != "kl_mean":
                continue
            values = inputs.distance(column)[subset.rows]
            scored = np.isfinite(values)
            if not scored.any():
                continue
            values = 1.0 - values[scored] if name == "acceptance" else values[scored]
            if name in _SKEWED:
                interval = studentized_interval(values, resamples=s.resamples, level=s.level, seed=s.seed)
            else:
                interval = bootstrap(values, resamples=s.resamples, level=s.level, seed=s.seed, method=s.method)
            results.append(
                subset.result(
                    f"distance/{name}",
                    float(values.mean()),
                    interval,
                    n=len(values),
                    level=s.level,
                    n_unscored=int((~scored).sum()),
                )
            )
    return results
