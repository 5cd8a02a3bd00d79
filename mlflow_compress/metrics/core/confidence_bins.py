"""Means of a distance by how confident the baseline was."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.requirements import TOKEN_DISTANCES, TOKEN_SCORES
from mlflow_compress.metrics.perplexity import corpus_confidence
from mlflow_compress.metrics.stats.arrays import Float, Int, finite, same_length
from mlflow_compress.metrics.stats.bootstrap import studentized_interval


@dataclass(frozen=True, kw_only=True)
class BinnedMean:
    """A mean by bin, ready to draw; only bins that hold values."""

    left: Float  # Edges of each bin; shape (n_bins,)
    right: Float
    n: Int  # Values in each bin; shape (n_bins,)
    # Mean and its studentised bootstrap interval; the bounds are NaN where a bin holds too few values for one; shape
    # (n_bins,)
    mean: Float
    low: Float
    high: Float


def mean_by_bin(
    confidence: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    edges: npt.ArrayLike | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> BinnedMean:
    """Return the mean of `values` by bin of a confidence in [0, 1].

    - `confidence`, `values` (n,): The baseline's confidence (top margin, probability), and the distance.
    - `edges` (n_bins + 1,): Increasing bin edges, default ten equal bins over [0, 1]; the last bin includes its right
      edge.
    """
    c, x = finite("confidence", confidence), finite("values", values)
    same_length(confidence=c, values=x)
    cuts = finite("edges", np.linspace(0.0, 1.0, 11) if edges is None else edges)
    if len(cuts) < 2 or (np.diff(cuts) <= 0).any() or c.min() < cuts[0] or c.max() > cuts[-1]:
        raise ConfigError("Bin edges must increase and enclose every value", got=f"{cuts[0]} to {cuts[-1]}")
    codes = np.minimum(np.searchsorted(cuts, c, side="right") - 1, len(cuts) - 2)
    used = np.unique(codes)
    rows = []
    for code in used:
        inside = x[codes == code]
        interval = studentized_interval(inside, resamples=resamples, level=level, seed=seed)
        rows.append((len(inside), float(inside.mean()), *(interval or (np.nan, np.nan))))
    n, mean, low, high = (np.array(column) for column in zip(*rows, strict=True))
    return BinnedMean(left=cuts[used], right=cuts[used + 1], n=n.astype(np.int64), mean=mean, low=low, high=high)


def kl_by_confidence(inputs: MetricInputs) -> BinnedMean | None:
    """Return the mean KL of choice items by bin of the baseline's top margin; None where there are none."""
    margin, kl = inputs.baseline_predictions.margin[:, 0], inputs.distance("kl")
    rows = np.isin(inputs.view.family, inputs.view.choice) & np.isfinite(margin) & np.isfinite(kl)
    s = inputs.settings
    if not rows.any():
        return None
    return mean_by_bin(margin[rows], kl[rows], level=s.level, resamples=s.resamples, seed=s.seed)


def token_kl_by_confidence(inputs: MetricInputs) -> BinnedMean | None:
    """Return the mean KL of corpus tokens by bin of the baseline's probability of the target; None without a corpus."""
    if inputs.missing(TOKEN_SCORES, TOKEN_DISTANCES) is not None:
        return None
    confidence, kl = corpus_confidence(inputs)
    s = inputs.settings
    return mean_by_bin(confidence, kl, level=s.level, resamples=s.resamples, seed=s.seed)
