"""Seeded bootstrap of any smooth function of column means, vectorised; units may be items or clusters."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import special

from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics.stats.arrays import Float, finite, moderate, same_length
from mlflow_compress.metrics.stats.intervals import Interval, check_level

Statistic = Callable[[Float], Float]
BootstrapMethod = Literal["bca", "percentile"]

_CHUNK = 4_000_000  # resampled rows held at once: 32 MB of float64
_KEPT = 32_000_000  # those kept for further metrics of as many units, in a byte each: 16,000 units, 2,000 times
_MAX_LOST = 0.05  # share of resamples in which the statistic may be undefined


def first_column(means: Float) -> Float:
    """Return the first column's mean: the statistic of a plain mean."""
    return np.asarray(means[..., 0], dtype=np.float64)


def ratio(means: Float) -> Float:
    """Return first column over second: the statistic of a ratio of sums."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(means[..., 0] / means[..., 1], dtype=np.float64)


def ratio_of_ratios(means: Float) -> Float:
    """Return the ratio of the first two columns over that of the others."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return ratio(means[..., :2]) / ratio(means[..., 2:])


def difference_of(statistic: Statistic) -> Statistic:
    """Return the statistic of the second half of the columns minus that of the first: of two models side by side."""

    def difference(means: Float) -> Float:
        half = means.shape[-1] // 2
        return statistic(means[..., half:]) - statistic(means[..., :half])

    return difference


def _draw(rng: np.random.Generator, n: int, rows: int) -> npt.NDArray[np.uint8]:
    """Return how often each of n units is drawn in each resample, shape (rows, n).

    One byte is enough: a count cannot exceed n, and beyond 255 units a count of 256 has a probability below 1e-300.
    """
    picks = rng.integers(0, n, size=(rows, n), dtype=np.int64)
    picks += np.arange(rows, dtype=np.int64)[:, None] * n
    return np.bincount(picks.ravel(), minlength=rows * n).reshape(rows, n).astype(np.uint8)


def _blocks(n: int, resamples: int, seed: int) -> Iterator[npt.NDArray[np.uint8]]:
    rng, step = np.random.default_rng(seed), max(1, _CHUNK // n)
    for start in range(0, resamples, step):
        yield _draw(rng, n, min(step, resamples - start))


def _all_counts(n: int, resamples: int, seed: int) -> npt.NDArray[np.uint8]:
    counts = np.concatenate(list(_blocks(n, resamples, seed)))
    counts.setflags(write=False)
    return counts


_small, _large = lru_cache(maxsize=16)(_all_counts), lru_cache(maxsize=4)(_all_counts)  # 64 and 128 MB at most


def resample_counts(n: int, resamples: int, seed: int) -> Iterator[Float]:
    """Iterate over how often each of n units is drawn, in blocks of shape (some of the resamples, n)."""
    # The same (n, resamples, seed) always gives the same resamples, so metrics of the same items share them.
    if n * resamples > _KEPT:
        yield from (counts.astype(np.float64) for counts in _blocks(n, resamples, seed))
        return
    counts, step = (_small if n * resamples <= _CHUNK else _large)(n, resamples, seed), max(1, _CHUNK // n)
    for start in range(0, resamples, step):
        yield counts[start : start + step].astype(np.float64)


def _check(resamples: int, level: float) -> None:
    if resamples < 100:
        raise ConfigError("A bootstrap interval needs at least 100 resamples", got=resamples)
    check_level(level)


def _bca_levels(thetas: Float, estimate: float, jackknife: Float, tails: Float) -> Float:
    # Sums of the same n numbers in another order are ties: which way they are rounded depends on the processor.
    ties = np.isclose(thetas, estimate, rtol=len(jackknife) * np.finfo(np.float64).eps, atol=0.0)
    below = ((thetas < estimate)[~ties].sum() + 0.5 * ties.sum()) / len(thetas)
    z0 = float(special.ndtri(np.clip(below, 0.5 / len(thetas), 1 - 0.5 / len(thetas))))
    gap = jackknife.mean() - jackknife
    square = float((gap**2).sum())
    a = float((gap**3).sum()) / (6.0 * square**1.5) if square > 0.0 else 0.0
    z = z0 + special.ndtri(tails)
    return np.asarray(special.ndtr(z0 + z / (1.0 - a * z)), dtype=np.float64)


def bootstrap(
    columns: npt.ArrayLike,
    statistic: Statistic = first_column,
    *,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
    method: BootstrapMethod = "bca",
) -> Interval | None:
    """Bootstrap interval of ``statistic(mean over units of columns)``; equal inputs give equal intervals.

    - `columns` (n_units,) or (n_units, n_columns): One row per unit that is drawn: an item, or a cluster's sums.
    - `statistic`: From means, shape (..., n_columns), to values, shape (...).
    - `method`: Bias-corrected and accelerated (jackknife acceleration), or plain percentiles.

    None where no interval exists: fewer than two units, the statistic undefined in more than 5 % of the resamples (a
    ratio whose denominator is often zero), or the same in all of them: units that are all alike say nothing of those
    that were not seen. Undefined resamples up to 5 % are left out.

    Source: Efron, "Better bootstrap confidence intervals", JASA 1987.
    """
    _check(resamples, level)
    raw = np.asarray(columns, dtype=np.float64)
    x = moderate("bootstrap columns", raw[:, None] if raw.ndim == 1 else raw, ndim=2)
    if len(x) < 2:
        return None
    estimate = float(statistic(x.mean(axis=0)))
    if not np.isfinite(estimate) or (x == x[0]).all():
        return None
    thetas = np.concatenate([statistic(w @ x / len(x)) for w in resample_counts(len(x), resamples, seed)])
    usable = np.isfinite(thetas)
    if usable.sum() < (1 - _MAX_LOST) * len(thetas):
        return None
    thetas = thetas[usable]
    if np.ptp(thetas) <= len(x) * np.finfo(np.float64).eps * abs(estimate):  # the same but for rounding
        return None
    tails = np.array([(1 - level) / 2, (1 + level) / 2])
    if method == "bca":
        left_out = statistic((x.sum(axis=0) - x) / (len(x) - 1))
        tails = _bca_levels(thetas, estimate, left_out[np.isfinite(left_out)], tails)
    low, high = np.quantile(thetas, tails)
    return Interval(float(low), float(high))


def jackknife_interval(columns: Float, statistic: Statistic, *, level: float) -> Interval | None:
    """Return ``m -+ t(G-1) sqrt((G-1)/G sum_g (m_(g) - m)^2)``, with m_(g) the statistic without unit g of G.

    None for a single unit, where the statistic does not exist without one of them, and where it is always the same.

    - `columns` (n_units, n_columns): One row per unit, as for `bootstrap`.

    Source: Tukey, "Bias and confidence in not-quite large samples", 1958.
    """
    count, total = len(columns), columns.sum(axis=0)
    if count < 2:
        return None
    mean = float(statistic(total / count))
    gaps = statistic((total - columns) / (count - 1)) - mean
    error = float(np.sqrt((count - 1) / count * (gaps**2).sum()))
    if not np.isfinite(error) or error <= count * np.finfo(np.float64).eps * abs(mean):  # the same but for rounding
        return None
    half = float(special.stdtrit(count - 1, 0.5 + level / 2)) * error
    return Interval(mean - half, mean + half)


def cluster_sums(columns: npt.ArrayLike, clusters: npt.ArrayLike) -> Float:
    """Return the columns' sums within each cluster, and its size, for a cluster bootstrap: shape (n_clusters, k + 1).

    `columns`, shape (n,) or (n, k), has the values of tokens or items, `clusters`, shape (n,), the document of each.
    """
    raw = np.asarray(columns, dtype=np.float64)
    x = finite("cluster columns", raw[:, None] if raw.ndim == 1 else raw, ndim=2)
    same_length(columns=x, clusters=np.asarray(clusters))
    _, codes = np.unique(np.asarray(clusters), return_inverse=True)
    sums = [np.bincount(codes, weights=x[:, j]) for j in range(x.shape[1])]
    return np.column_stack([*sums, np.bincount(codes)]).astype(np.float64)


UPPER_TAIL = 0.6
"""Share of the nominal tail (2.5 % at 95 %) that the upper end's quantile leaves: 1.5 %.

Calibrated on real samples of 200 items and more whose largest item holds under 5 % of the mean: with the whole tail one
misses in 5.2 % of the draws, more than the 5 % that are accepted; with this, none does in more than 3.9 %.
"""

_ROUNDING = 1e-12  # a variance below this share of the second moment is that of equal values


def studentized_interval(
    values: npt.ArrayLike,
    sizes: npt.ArrayLike | None = None,
    *,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval | None:
    """Studentised bootstrap interval of a mean, or of a ratio of sums over clusters.

    With ``r = sum(a)/sum(b)``, ``e_i = a_i - r b_i`` and ``se = sqrt(sum(e²))/sum(b)``, every resample has
    ``t* = (r* - r)/se*``, and the interval is ``[r - t*_(upper) se, r' - t*_(lower) se']``: the lower end takes the
    quantile of t* that leaves ``(1 - level)/2`` above it, the upper end the one that leaves `UPPER_TAIL` times as much
    below it. The lower end is not below 0 where no value is.

    Here r' and se' are those of the sample with one unit more, whose e is the largest: a copy of a unit, of twice its
    size but no larger than the largest one. What the heaviest unit is, a sample may not have seen, and a small one that
    has much could have been large. Of 20 to 300 clusters whose means are lognormal (sigma 1.5) the interval covers 93
    to 97 % with it, and 88 to 92 % without (`benchmarks/interval_edges.py`).

    - `values` (n,): One value per item, or the sum ``a_i`` of each cluster.
    - `sizes` (n,): Number of values ``b_i`` in each cluster; without it every unit counts as one.

    None for a single unit, for values that are all alike, and where so few differ that a resample with nothing but
    equal values is not rarer than the tail: its t* is infinite.

    Source: Efron, "Nonparametric standard errors and confidence intervals", 1981; Hall, "Theoretical comparison of
    bootstrap confidence intervals", Annals of Statistics 1988. `UPPER_TAIL` and the heaviest unit's copy are
    this project's.
    """
    _check(resamples, level)
    a = moderate("values", values)
    b = np.ones(len(a)) if sizes is None else moderate("sizes", sizes)
    same_length(values=a, sizes=b)
    if len(a) < 2:
        return None
    estimate = float(a.sum() / b.sum())
    e = a - estimate * b
    if float(e @ e) <= _ROUNDING * float(a @ a):
        return None
    table = np.column_stack([e, b, e * e, e * b, b * b])
    t = np.concatenate([_t_of(counts @ table) for counts in resample_counts(len(a), resamples, seed)])
    tail = (1 - level) / 2
    with np.errstate(invalid="ignore"):  # an infinite t* beside a finite one has no mean
        lowest, highest = np.quantile(t, [UPPER_TAIL * tail, 1 - tail])
    low = estimate - float(highest) * float(np.sqrt(e @ e) / b.sum())
    larger = np.minimum(2.0 * b, b.max()) / np.where(b > 0.0, b, 1.0)
    heaviest = int((e * larger).argmax())
    a, b = (np.append(x, x[heaviest] * larger[heaviest]) for x in (a, b))
    estimate = float(a.sum() / b.sum())
    e = a - estimate * b
    high = estimate - float(lowest) * float(np.sqrt(e @ e) / b.sum())
    if not np.isfinite([low, high]).all():
        return None
    return Interval(max(low, 0.0) if (a >= 0.0).all() else low, high)


def _t_of(sums: Float) -> Float:
    """Return t* of each resample from its sums of e, b, e², e b and b², shape (n_resamples, 5)."""
    e, b, ee, eb, bb = sums.T
    d = e / b  # r* - r
    spread = ee - 2.0 * d * eb + d * d * bb
    spread[spread <= _ROUNDING * (ee + d * d * bb)] = 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        t = d * b / np.sqrt(spread)
    return np.asarray(np.where((d == 0.0) & (spread == 0.0), 0.0, t), dtype=np.float64)
