"""Corpus perplexity and token statistics, with llama.cpp's definitions and propagated uncertainties."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.metrics.stats.arrays import Float, Int, finite, moderate, same_length

_KL_LEVELS = (1.0, 0.999, 0.99, 0.95, 0.90, 0.75, 0.5, 0.25, 0.10, 0.05, 0.01, 0.001, 0.0)
"""Percentiles that are reported, from the maximum to the minimum, as shares."""


class WithUncertainty(NamedTuple):
    """A value with its standard uncertainty (one sigma), tokens taken as independent."""

    value: float
    uncertainty: float


@dataclass(frozen=True, kw_only=True)
class CorpusStatistics:
    """What `llama-perplexity --kl-divergence` prints; probabilities as shares (llama.cpp prints percent)."""

    n: int  # Scored tokens
    # ``exp(mean nll)``, ``u = PPL se(nll)``; None where a float cannot hold it, as the others of a perplexity
    perplexity_baseline: WithUncertainty | None
    perplexity_variant: WithUncertainty | None
    # ``ln(PPL_q/PPL_b)``, ``PPL_q/PPL_b``, ``PPL_q - PPL_b``, with the covariance of both nlls propagated
    log_ratio: WithUncertainty
    ratio: WithUncertainty | None
    difference: WithUncertainty | None
    # Of the two nlls (llama.cpp's "Cor(ln(PPL(Q)), ln(PPL(base)))"); None where one of them does not vary
    correlation: float | None
    kl: WithUncertainty  # Mean ``KL(P_b || P_q)`` in nats
    # Mean and root mean square of ``p_q(target) - p_b(target)``; ``u(RMS) = se(dp²) / (2 RMS)``
    dp_mean: WithUncertainty
    dp_rms: WithUncertainty
    p_correlation: float | None  # Pearson correlation of the target probabilities
    same_top: WithUncertainty  # Share of equal argmax tokens, ``u = sqrt(p (1 - p)/(n - 1))``
    # By share (0.999 is the 99.9th percentile), linear interpolation at ``f (n - 1)``
    kl_percentiles: Mapping[float, float]
    dp_percentiles: Mapping[float, float]


def mean_and_error(values: npt.ArrayLike) -> WithUncertainty:
    """Return the mean and ``se = sqrt((mean(x²) - mean(x)²)/(n - 1))``, llama.cpp's `mean_and_uncertainty`.

    The moments are counted from the first value, so that what varies little keeps its digits.
    """
    x = moderate("values", values)
    n, origin = len(x), float(x[0])
    shifted = x - origin
    mean = float(shifted.mean())
    variance = max(float(shifted @ shifted) / n - mean * mean, 0.0)
    return WithUncertainty(origin + mean, float(np.sqrt(variance / (n - 1))) if n > 1 else 0.0)


def _covariance(a: Float, b: Float) -> float:
    """Covariance of two means, llama.cpp's ``(mean(ab) - mean(a) mean(b))/(n - 1)``."""
    x, y, n = a - a[0], b - b[0], len(a)
    return float((x @ y) / n - x.mean() * y.mean()) / (n - 1) if n > 1 else 0.0


def _correlation(a: Float, b: Float) -> float | None:
    u_a, u_b = mean_and_error(a).uncertainty, mean_and_error(b).uncertainty
    return _covariance(a, b) / (u_a * u_b) if u_a > 0.0 and u_b > 0.0 else None


def _held(value: float, uncertainty: float) -> WithUncertainty | None:
    return WithUncertainty(float(value), float(uncertainty)) if np.isfinite([value, uncertainty]).all() else None


def percentiles(values: npt.ArrayLike, levels: tuple[float, ...] = _KL_LEVELS) -> dict[float, float]:
    """Return quantiles by share, linearly interpolated at ``f (n - 1)`` as llama.cpp does."""
    x = finite("values", values)
    return dict(zip(levels, map(float, np.quantile(x, levels)), strict=True))


def corpus_statistics(
    *,
    nll_baseline: npt.ArrayLike,
    nll_variant: npt.ArrayLike,
    kl: npt.ArrayLike,
    p_baseline: npt.ArrayLike,
    p_variant: npt.ArrayLike,
    same_top: npt.ArrayLike,
) -> CorpusStatistics:
    """Reduce token records, each of shape (n_tokens,), to every statistic of llama.cpp's KL report.

    The negative log-likelihood and probability are those of the target; nats.

    Source: llama.cpp, `tools/perplexity/perplexity.cpp`. Not copied: its 16-bit storage of the baseline's
    log-probabilities (errors up to 1.22e-4 nat), the KL over tokens with ``ln p_b > -16`` only, which makes slightly
    negative KLs.
    """
    nll_b, nll_q = moderate("nll_baseline", nll_baseline), moderate("nll_variant", nll_variant)
    p_b, p_q, divergence = finite("p_baseline", p_baseline), finite("p_variant", p_variant), finite("kl", kl)
    top = np.asarray(same_top, dtype=bool)
    n = same_length(nll_baseline=nll_b, nll_variant=nll_q, kl=divergence, p_baseline=p_b, p_variant=p_q, same_top=top)
    for name, p in (("p_baseline", p_b), ("p_variant", p_q)):
        if p.min() < 0.0 or p.max() > 1.0 + 1e-6:
            raise DataError(f"{name} must hold probabilities", got=f"{p.min()} to {p.max()}")
    dp = p_q - p_b
    b, q = mean_and_error(nll_b), mean_and_error(nll_q)
    covariance = _covariance(nll_b, nll_q)
    u_log = float(np.sqrt(max(q.uncertainty**2 + b.uncertainty**2 - 2 * covariance, 0.0)))
    with np.errstate(over="ignore", invalid="ignore"):
        ppl_b, ppl_q, ratio = np.exp(b.value), np.exp(q.value), np.exp(q.value - b.value)
        u_b, u_q, u_ratio = ppl_b * b.uncertainty, ppl_q * q.uncertainty, ratio * u_log
        u_difference = np.sqrt(np.maximum(u_q**2 + u_b**2 - 2 * ppl_q * ppl_b * covariance, 0.0))
        difference = ppl_q - ppl_b
    square, share = mean_and_error(dp**2), float(top.mean())
    rms = float(np.sqrt(square.value))
    return CorpusStatistics(
        n=n,
        perplexity_baseline=_held(ppl_b, u_b),
        perplexity_variant=_held(ppl_q, u_q),
        log_ratio=WithUncertainty(q.value - b.value, u_log),
        ratio=_held(ratio, u_ratio),
        difference=_held(difference, u_difference),
        correlation=_correlation(nll_b, nll_q),
        kl=mean_and_error(divergence),
        dp_mean=mean_and_error(dp),
        dp_rms=WithUncertainty(rms, 0.5 / rms * square.uncertainty if rms > 0.0 else 0.0),
        p_correlation=_correlation(p_b, p_q),
        same_top=WithUncertainty(share, float(np.sqrt(share * (1 - share) / (n - 1))) if n > 1 else 0.0),
        kl_percentiles=percentiles(divergence),
        dp_percentiles=percentiles(dp),
    )


@dataclass(frozen=True, kw_only=True)
class DifferenceShape:
    """Shape of ``d = ln p_q(target) - ln p_b(target)`` over tokens."""

    n: int  # Tokens
    mean: float  # Mean (minus the change of the log-perplexity) and standard deviation in nats
    std: float
    skewness: float | None  # Third standardised moment; None where the differences do not vary
    better: float  # Share of tokens that the variant finds more, or less, likely
    worse: float
    # Kolmogorov distance between the distributions of `d` and of `-d`, in [0, 1]; 0 for a symmetric distribution, where
    # gains and losses cancel and the perplexity stays
    asymmetry: float
    edges: Float  # Histogram over symmetric edges; values outside the last edges are in the outer bins
    counts: Int


def difference_shape(
    nll_baseline: npt.ArrayLike, nll_variant: npt.ArrayLike, *, n_bins: int = 61, clip: float = 0.995
) -> DifferenceShape:
    """Describe the log-likelihood differences of two models on the same tokens, in nats.

    The number of bins is odd, so that one is centred on 0; `clip` is the quantile of ``|d|`` at which they end.

    Source: Dutta et al., "Accuracy is Not All You Need", section 6: the differences are nearly symmetric about 0.
    """
    if n_bins < 3 or n_bins % 2 == 0:
        raise ConfigError("n_bins must be odd and at least 3", got=n_bins)
    if not 0.0 < clip <= 1.0:
        raise ConfigError("clip must lie in (0, 1]", got=clip)
    b, q = finite("nll_baseline", nll_baseline), finite("nll_variant", nll_variant)
    same_length(nll_baseline=b, nll_variant=q)
    d = b - q
    std = float(d.std())
    end = float(np.quantile(np.abs(d), clip)) or 1.0  # all differences 0: any width will do
    edges = np.linspace(-end, end, n_bins + 1)
    counts, _ = np.histogram(np.clip(d, -end, end), bins=edges)
    ordered, mirrored = np.sort(d), np.sort(-d)
    points = np.concatenate([ordered, mirrored])
    gap = np.searchsorted(ordered, points, side="right") - np.searchsorted(mirrored, points, side="right")
    return DifferenceShape(
        n=len(d),
        mean=float(d.mean()),
        std=std,
        skewness=float(((d - d.mean()) ** 3).mean() / std**3) if std > 0.0 else None,
        better=float((d > 0).mean()),
        worse=float((d < 0).mean()),
        asymmetry=float(np.abs(gap).max() / len(d)),
        edges=np.asarray(edges, dtype=np.float64),
        counts=counts.astype(np.int64),
    )
