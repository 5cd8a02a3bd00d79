"""What a reader must know beside the headline table: unscored items, cut prompts, the noise floor, failed stages."""

from __future__ import annotations

from collections.abc import Mapping

from mlflow_compress.metrics.core.metric_registry import all_keys, headline_keys
from mlflow_compress.records import MetricResult
from mlflow_compress.report.differences import noise_floor
from mlflow_compress.report.rows import KL, Pooled, kl_not_trusted, only_generated


def _unscored(pooled: Pooled) -> list[str]:
    """Return a sentence for each number of items (or answers) that have no value."""
    found: dict[str, None] = {}
    for key in headline_keys():
        result = pooled.get(key.name)
        if result is not None and result.n_unscored and key.unscored:
            why = "no answer was generated" if key.counted == "items" and only_generated(pooled) else key.unscored
            found[f"{result.n_unscored:,} of {result.n + result.n_unscored:,} {key.counted} unscored: {why}."] = None
    return list(found)


def _sampled(pooled: Pooled, name: str, things: str) -> str | None:
    """Return how much of what a distance is from its noise floor is from."""
    distance: MetricResult | None = pooled.get(name)
    floor = noise_floor(pooled, name)
    if distance is None or floor is None:
        return None
    if floor.n < distance.n:
        return f"a sample of {floor.n:,} of {distance.n:,} {things}"
    return f"{floor.n:,} {things}"


def _noise(pooled: Pooled) -> list[str]:
    items = _sampled(pooled, KL, "items") or _sampled(pooled, "distance/flips_pct", "items")
    parts = [part for part in (items, _sampled(pooled, "distance/corpus_kl_mean", "corpus tokens")) if part]
    return [f"Noise floor (the baseline against itself in a second run) from {' and '.join(parts)}."] if parts else []


def footnotes(pooled: Pooled, *, gates: Mapping[str, float] | None = None, n_truncated: int = 0) -> list[str]:
    """Return the sentences under the headline table; none where there is nothing to say.

    Parameters
    ----------
    pooled : mapping of str to MetricResult
        Pooled results by key: `metrics.headline(results)`.
    gates : mapping of str to float, optional
        What a promotion reads of these results, by key.
    n_truncated : int
        Prompts of which the model read the end only.
    """
    notes = []
    if kl_not_trusted(pooled, gates):
        notes.append(
            "The interval of the mean KL cannot be trusted here (few items, or one item holds much of the mean): "
            "the gate reads the clipped mean and the share of items above the clip."
        )
    notes += _unscored(pooled)
    if n_truncated:
        prompts = "1 prompt was" if n_truncated == 1 else f"{n_truncated:,} prompts were"
        notes.append(f"{prompts} longer than the model's context and lost the beginning.")
    return notes + _noise(pooled)


def _measured_by(stage: str) -> str:
    """Return the labels of the metrics that only this stage can compute, or words for them."""
    labels = [key.label for key in all_keys().values() if key.label and key.name.startswith(f"{stage}/")]
    return ", ".join(labels) or "what it measures"


def failures(failed_stages: Mapping[str, str] | None) -> list[str]:
    """Return one sentence per failed stage: its message and what is therefore missing.

    Parameters
    ----------
    failed_stages : mapping of str to str, optional
        Name of the stage to its error message.
    """
    return [
        f"Stage {stage} failed: {message.rstrip('.')}. Missing: {_measured_by(stage)}."
        for stage, message in (failed_stages or {}).items()
    ]
