"""Computes every registered metric whose requirements are met, and gives the reason for the others."""

from __future__ import annotations

from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import METRICS
from mlflow_compress.records import MetricResult


def unmet(inputs: MetricInputs) -> dict[str, str]:
    """Return the metrics that cannot be computed from the inputs, by name, with the first reason for each."""
    reasons: dict[str, str] = {}
    for name, metric in METRICS.items():
        for requirement in metric.requires:
            reason = inputs.missing(requirement)
            if reason is not None:
                reasons[name] = reason
                break
    return reasons


def compute_all(inputs: MetricInputs) -> list[MetricResult]:
    """Return the results of every registered metric whose requirements are met, in the order of the metrics' names.

    Headline values have neither task nor category; the same keys by task and by category follow them.

    Raises
    ------
    AlignmentError
        When baseline and variant do not describe the same items, answer orders or tokens.
    DataError
        When records hold NaN or infinite values or are incomplete.
    """
    skipped = unmet(inputs)
    return [result for name, metric in METRICS.items() if name not in skipped for result in metric.compute(inputs)]


def headline(results: list[MetricResult]) -> dict[str, MetricResult]:
    """Return the pooled results by key: what a run's table shows."""
    return {r.name: r for r in results if r.task is None and r.category is None}
