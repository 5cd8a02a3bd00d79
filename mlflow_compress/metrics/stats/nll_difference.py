"""The distribution of log-likelihood differences, which explains how answers change at the same perplexity."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics.stats.arrays import Float, Int, finite, same_length


@dataclass(frozen=True, kw_only=True)
class DifferenceShape:
    """Shape of ``d = ln p_q(target) - ln p_b(target)`` over tokens.

    Attributes
    ----------
    n : int
        Tokens.
    mean, std : float
        Mean (minus the change of the log-perplexity) and standard deviation in nats.
    skewness : float or None
        Third standardised moment; None where the differences do not vary.
    better, worse : float
        Share of tokens that the variant finds more, or less, likely.
    asymmetry : float
        Kolmogorov distance between the distributions of `d` and of `-d`, in [0, 1]; 0 for a symmetric distribution,
        where gains and losses cancel and the perplexity stays.
    edges, counts : numpy.ndarray, shapes (n_bins + 1,) and (n_bins,)
        Histogram over symmetric edges; values outside the last edges are in the outer bins.
    """

    n: int
    mean: float
    std: float
    skewness: float | None
    better: float
    worse: float
    asymmetry: float
    edges: Float
    counts: Int


def difference_shape(
    nll_baseline: npt.ArrayLike, nll_variant: npt.ArrayLike, *, n_bins: int = 61, clip: float = 0.995
) -> DifferenceShape:
    """Describe the log-likelihood differences of two models on the same tokens.

    Parameters
    ----------
    nll_baseline, nll_variant : array_like, shape (n,)
        Negative log-likelihoods in nats.
    n_bins : int
        Odd number of bins, so that one is centred on 0.
    clip : float
        Quantile of ``|d|`` at which the histogram ends.

    References
    ----------
    Dutta et al., "Accuracy is Not All You Need", section 6: the differences are nearly symmetric about 0.
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
