"""The metrics that no stage of a variant has computed, with reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mlflow_compress.metrics.core.metric_registry import METRICS
from mlflow_compress.records import MetricResult


def not_computed(
    results: Iterable[MetricResult],
    *,
    evaluated: Mapping[str, str],
    judged: Mapping[str, str] | str,
    timed: Mapping[str, str] | str,
) -> dict[str, str]:
    """Return the reason for each metric without a result, given by the stage that computes it.

    The stages read different records. So each one lists metrics that only another one computes.

    Parameters
    ----------
    results : iterable of MetricResult
        Results of all stages.
    evaluated : mapping of str to str
        Reasons by metric, from the evaluate stage.
    judged : mapping of str to str, or str
        The same from the judge stage, or the reason why that stage has none.
    timed : mapping of str to str, or str
        The same from the speed stage.
    """
    of_stage: dict[str, Mapping[str, str] | str] = {"judge/": judged, "speed/": timed}
    computed = {result.name for result in results}
    found: dict[str, str] = {}
    for name, metric in METRICS.items():
        keys = {key.name for key in metric.keys}
        if computed & keys:
            continue
        reasons = next((r for prefix, r in of_stage.items() if all(k.startswith(prefix) for k in keys)), evaluated)
        reason = reasons if isinstance(reasons, str) else reasons.get(name)
        if reason is not None:
            found[name] = reason
    return found
