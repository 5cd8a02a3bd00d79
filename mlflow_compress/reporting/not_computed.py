"""The metrics that no stage of a variant has computed, with reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mlflow_compress.metrics.core.metric_registry import METRICS
from mlflow_compress.records import MetricResult


def not_computed(
    results: Iterable[MetricResult], *, evaluated: Mapping[str, str], judged: Mapping[str, str] | str
) -> dict[str, str]:
    """Return the reason for each metric without a result, given by the stage that computes it.

    The evaluate and judge stages read different records. So each stage lists metrics that only the other one computes.

    Parameters
    ----------
    results : iterable of MetricResult
        Results of all stages.
    evaluated : mapping of str to str
        Reasons by metric, from the evaluate stage.
    judged : mapping of str to str, or str
        The same from the judge stage, or the reason why that stage has none.
    """
    computed = {result.name for result in results}
    found: dict[str, str] = {}
    for name, metric in METRICS.items():
        keys = {key.name for key in metric.keys}
        if computed & keys:
            continue
        if not all(key.startswith("judge/") for key in keys):
            reason = evaluated.get(name)
        else:
            reason = judged if isinstance(judged, str) else judged.get(name)
        if reason is not None:
            found[name] = reason
    return found
