"""Which metrics no stage of a variant could compute, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mlflow_compress.metrics.core.metric_registry import METRICS
from mlflow_compress.records import MetricResult


def not_computed(
    results: Iterable[MetricResult], *, evaluated: Mapping[str, str], judged: Mapping[str, str] | str
) -> dict[str, str]:
    """Return the metrics without any result, by name, each with the reason of the stage that is to compute it.

    Evaluation and judging see different records, so each stage lists as missing what the other has computed.

    Parameters
    ----------
    results : iterable of MetricResult
        Of all stages.
    evaluated : mapping of str to str
        Metric to reason, from the evaluate stage.
    judged : mapping of str to str, or str
        The same from the judge stage, or why that stage has none.
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
