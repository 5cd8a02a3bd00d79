"""What a reader must know beside the headline table: unscored items, cut prompts, the noise floor, failed stages."""

from __future__ import annotations

from collections.abc import Mapping

from mlflow_compress.records import MetricResult
from mlflow_compress.report.differences import noise_floor
from mlflow_compress.report.rows import KL, Pooled, kl_not_trusted, only_generated

_TOO_LONG = "an option is longer than the model's context"
# Results that show how many items (or answers) have no value, in the order of preference, and why that happens.
_UNSCORED = (
    ("distance/flips_pct", "items", _TOO_LONG),
    ("quality/accuracy", "items", _TOO_LONG),
    (KL, "items", _TOO_LONG),
    ("judge/mt_bench", "answers", "the judge gave no grade that can be read"),
)
_MEASURED_BY = {"judge": "similarity of answers, ROUGE-L, BLEU and MT-Bench"}


def _unscored(pooled: Pooled) -> list[str]:
    found: dict[str, None] = {}
    for name, things, reason in _UNSCORED:
        result = pooled.get(name)
        if result is not None and result.n_unscored:
            why = "no answer was generated" if things == "items" and only_generated(pooled) else reason
            found[f"{result.n_unscored:,} of {result.n + result.n_unscored:,} {things} unscored: {why}."] = None
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


def failures(failed_stages: Mapping[str, str] | None) -> list[str]:
    """Return one sentence per failed stage: its message and what is therefore missing.

    Parameters
    ----------
    failed_stages : mapping of str to str, optional
        Name of the stage to its error message.
    """
    return [
        f"Stage {stage} failed: {message.rstrip('.')}. Missing: {_MEASURED_BY.get(stage, 'what it measures')}."
        for stage, message in (failed_stages or {}).items()
    ]
