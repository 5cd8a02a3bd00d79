"""Exact metrics: records or arrays in, results out; numpy and scipy only, no model, no I/O, no tracking.

A new metric is one new file with a function under `@metric(name, ...)`; `compute_all` finds it.
"""

from mlflow_compress.metrics.core.estimates import Mean, Number, PairedDifference, Proportion, by_subset, pooled
from mlflow_compress.metrics.core.metric_inputs import (
    AnswerEmbeddings,
    AnswerSamples,
    MetricInputs,
    MetricSettings,
    headline,
)
from mlflow_compress.metrics.core.metric_registry import (
    METRICS,
    Metric,
    MetricKey,
    all_keys,
    compute_all,
    key,
    metric,
    unmet,
)

__all__ = [
    "METRICS",
    "AnswerEmbeddings",
    "AnswerSamples",
    "Mean",
    "Metric",
    "MetricInputs",
    "MetricKey",
    "MetricSettings",
    "Number",
    "PairedDifference",
    "Proportion",
    "all_keys",
    "by_subset",
    "compute_all",
    "headline",
    "key",
    "metric",
    "pooled",
    "unmet",
]
