"""Gaussian-noise control: what a model without any bias in its errors would show.

Table 19 of "Accuracy is Not All You Need" adds zero-mean noise to log-probabilities and reports a perplexity that
stays while the KL divergence grows. Both cannot come from one distribution: after renormalisation the mean change of
the nll equals the mean KL where targets follow the baseline, so the perplexity WOULD rise. The constant perplexity is
that of the target's noisy log-probability WITHOUT renormalisation; the divergence is that of the renormalised
distribution. Both are computed here, and the renormalised perplexity beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics.arrays import finite


@dataclass(frozen=True, kw_only=True)
class NoiseControl:
    """What noise of one size does.

    Attributes
    ----------
    scale : float
        Standard deviation of the noise in nats.
    perplexity_baseline : float
        Without noise.
    perplexity_table : float
        The paper's: ``exp(-mean(ln p(target) + noise))``, not renormalised; it stays.
    perplexity_renormalised : float
        Of the distribution that the KL is taken to; it rises.
    kl_mean : float
        Mean ``KL(P || softmax(ln P + noise))`` in nats.
    top1_agreement : float
        Share of positions whose most probable token stays.
    """

    scale: float
    perplexity_baseline: float
    perplexity_table: float
    perplexity_renormalised: float
    kl_mean: float
    top1_agreement: float


def gaussian_control(
    log_probs: npt.ArrayLike, targets: npt.ArrayLike, *, scale: float, seed: int = 0, chunk: int = 1024
) -> NoiseControl:
    """Add Gaussian noise to log-probabilities and measure what the table measures.

    Parameters
    ----------
    log_probs : array_like, shape (n, n_vocab)
        Normalised natural log-probabilities of the baseline, finite.
    targets : array_like of int, shape (n,)
        The observed tokens.
    scale : float
        Standard deviation of the noise in nats, at least 0.
    seed : int
        Seed of the noise.
    chunk : int
        Positions that are held with noise at once.
    """
    if scale < 0.0 or not np.isfinite(scale):
        raise ConfigError("The noise scale must be finite and not negative", got=scale)
    log_p, y = finite("log-probabilities", log_probs, ndim=2), np.asarray(targets, dtype=np.int64)
    if y.shape != (len(log_p),) or y.min() < 0 or y.max() >= log_p.shape[1]:
        raise DataError("targets must give one token of the vocabulary a position", got=f"shape {y.shape}")
    if not np.allclose(np.exp(log_p).sum(axis=1), 1.0, atol=1e-4):
        raise DataError("log_probs must be normalised: exp must sum to 1 over the last axis")
    rng = np.random.default_rng(seed)
    plain, table, renormalised, kl, same = 0.0, 0.0, 0.0, 0.0, 0
    for start in range(0, len(log_p), chunk):
        p, rows = log_p[start : start + chunk], np.arange(len(log_p[start : start + chunk]))
        noise = scale * rng.standard_normal(p.shape)
        noisy = p + noise
        top = noisy.max(axis=1, keepdims=True)
        log_z = (top + np.log(np.exp(noisy - top).sum(axis=1, keepdims=True)))[:, 0]
        target = y[start : start + chunk]
        plain -= float(p[rows, target].sum())
        table -= float(noisy[rows, target].sum())
        renormalised -= float((noisy[rows, target] - log_z).sum())
        kl += float((log_z - (np.exp(p) * noise).sum(axis=1)).sum())
        same += int((noisy.argmax(axis=1) == p.argmax(axis=1)).sum())
    n = len(log_p)
    return NoiseControl(
        scale=scale,
        perplexity_baseline=float(np.exp(plain / n)),
        perplexity_table=float(np.exp(table / n)),
        perplexity_renormalised=float(np.exp(renormalised / n)),
        kl_mean=kl / n,
        top1_agreement=same / n,
    )
