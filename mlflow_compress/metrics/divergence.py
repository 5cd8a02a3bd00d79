"""Divergences of two distributions, and eq. 1 of the flips paper over the items."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import DataError
from mlflow_compress.metrics.arrays import Float
from mlflow_compress.metrics.bootstrap import bootstrap
from mlflow_compress.metrics.evidence import Evidence
from mlflow_compress.metrics.registry import METRICS, Direction, Key, metric
from mlflow_compress.metrics.studentized import studentized_interval
from mlflow_compress.metrics.view import CHOICE
from mlflow_compress.records import MetricResult

SCORED = (*CHOICE, "last_word")
"""Families that have option distances and an eq. 1 value."""

LN2 = float(np.log(2.0))


def _log_probs(name: str, values: npt.ArrayLike) -> Float:
    x = np.asarray(values, dtype=np.float64)
    if x.size == 0 or x.ndim == 0:
        raise DataError(f"{name} must be log-probabilities over the last axis", got=f"shape {x.shape}")
    total = np.exp(x).sum(axis=-1)
    if np.isnan(x).any() or not np.allclose(total, 1.0, atol=1e-4):
        raise DataError(f"{name} must be log-probabilities: exp must sum to 1 over the last axis")
    return x


def _checked(p: npt.ArrayLike, q: npt.ArrayLike) -> tuple[Float, Float]:
    log_p, log_q = _log_probs("the baseline's values", p), _log_probs("the variant's values", q)
    if log_p.shape != log_q.shape:
        raise DataError("Both distributions must have one shape", got=f"{log_p.shape} and {log_q.shape}")
    return log_p, log_q


def _sum_p_log(log_p: Float, log_ratio_to: Float) -> Float:
    # 0 ln 0 = 0, and p > 0 where q = 0 gives an infinite divergence, as the definition says.
    with np.errstate(invalid="ignore"):
        terms = np.where(np.isneginf(log_p), 0.0, np.exp(log_p) * (log_p - log_ratio_to))
    return np.asarray(terms.sum(axis=-1), dtype=np.float64)


def kl_divergence(log_p: npt.ArrayLike, log_q: npt.ArrayLike) -> Float:
    """``KL(P || Q) = sum_v p_v (ln p_v - ln q_v)`` in nats over the last axis; infinite where q = 0 < p.

    Parameters
    ----------
    log_p, log_q : array_like, shape (..., n_vocab)
        Natural log-probabilities, normalised.

    Examples
    --------
    >>> round(float(kl_divergence(np.log([0.5, 0.5]), np.log([0.25, 0.75]))), 6)
    0.143841
    """
    return _sum_p_log(*_checked(log_p, log_q))


def js_divergence(log_p: npt.ArrayLike, log_q: npt.ArrayLike) -> Float:
    """Jensen-Shannon divergence ``(KL(P || M) + KL(Q || M))/2`` with ``M = (P + Q)/2``, in nats, in [0, ln 2]."""
    p, q = _checked(log_p, log_q)
    mean = np.logaddexp(p, q) - LN2
    return (_sum_p_log(p, mean) + _sum_p_log(q, mean)) / 2.0


def acceptance_rate(log_p: npt.ArrayLike, log_q: npt.ArrayLike) -> Float:
    """``sum_v min(p_v, q_v) = 1 - TV``: how often speculative decoding would accept the variant's token."""
    p, q = _checked(log_p, log_q)
    return np.asarray(np.exp(np.minimum(p, q)).sum(axis=-1), dtype=np.float64)


def total_variation(log_p: npt.ArrayLike, log_q: npt.ArrayLike) -> Float:
    """``TV = sum_v |p_v - q_v| / 2``, in [0, 1]."""
    p, q = _checked(log_p, log_q)
    return np.asarray(np.abs(np.exp(p) - np.exp(q)).sum(axis=-1) / 2.0, dtype=np.float64)


def _key(name: str, direction: Direction, high: float, unit: str, meaning: str) -> Key:
    return Key(name=f"distance/{name}", direction=direction, low=0.0, high=high, unit=unit, meaning=meaning)


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
    needs=("items", "variant", "option_distances"),
    source="Accuracy is Not All You Need, eq. 1; natural log, full vocabulary",
)
def divergence(evidence: Evidence) -> list[MetricResult]:
    """Mean over items of the mean over options of the mean over tokens; bootstrap over items.

    Divergences are skewed: their interval is the studentised bootstrap's.

    Lettered options of one token share a context, so that the mean over them is one divergence a question.
    """
    s = evidence.settings
    results = []
    pooled = [family for family in evidence.headline_families if family in SCORED]
    for part in evidence.parts(SCORED, pooled=pooled):
        for name, column in _COLUMNS.items():
            if part.category is not None and name != "kl_mean":
                continue
            values = evidence.distance(column)[part.rows]
            scored = np.isfinite(values)
            if not scored.any():
                continue
            values = 1.0 - values[scored] if name == "acceptance" else values[scored]
            if name in _SKEWED:
                interval = studentized_interval(values, resamples=s.resamples, level=s.level, seed=s.seed)
            else:
                interval = bootstrap(values, resamples=s.resamples, level=s.level, seed=s.seed, method=s.method)
            results.append(
                part.result(
                    f"distance/{name}",
                    float(values.mean()),
                    interval,
                    n=len(values),
                    level=s.level,
                    n_unscored=int((~scored).sum()),
                )
            )
    return results
