"""Which interval of the mean KL covers: upper misses and widths of several methods, on real KL per item.

A sample of n items is drawn with replacement from the N items of a variant, whose mean is the truth. At 95 % the upper
end may lie below the truth in 2.5 % of the draws. Printed per sample and method: that share, and the width of the upper
half relative to the percentile bootstrap's. Then, in percent of the draws: how often a gate would read the interval by
the rule of documents, and how often it reads one that misses; upper misses of the clipped mean (and its upper end
relative to that of the mean) and of the share above the clip. The KL per item is `interval_samples.py`'s; the stored
file is what it wrote.

Example
-------
python benchmarks/interval_coverage.py
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from interval_samples import samples
from scipy.stats import norm
from scipy.stats import t as student

from mlflow_compress.metrics.kl_tail import CLIP
from mlflow_compress.metrics.perplexity import GATED_DOCUMENTS, GATED_TOP_PCT
from mlflow_compress.metrics.stats.bootstrap import UPPER_TAIL, resample_counts, studentized_interval
from mlflow_compress.metrics.stats.intervals import bounded_mean_interval, wilson

Float = npt.NDArray[np.float64]
STORED = Path(__file__).with_name("kl_per_item.npz")
SIZES = (50, 100, 200, 300, 500)
TAIL = 0.025
SEED = 0  # of the resamples
BOUNDED = 200  # draws that the bounds of the clipped mean are computed for, one at a time


class Draws:
    """Samples of one size and the moments of their resamples, which all methods share.

    `x` has shape (n_draws, n); `mean`, `spread` (standard deviation) and `skew` (third standardised moment) (n_draws,).
    `means`, `spreads` and `skews` are those of every resample, (n_draws, n_resamples), means less the sample's.
    """

    def __init__(self, population: Float, n: int, draws: int, resamples: int) -> None:
        rng = np.random.default_rng(n)
        self.x, self.n = rng.choice(population, size=(draws, n)), n
        self.mean = self.x.mean(axis=1)
        e = self.x - self.mean[:, None]
        self.spread = np.sqrt((e**2).mean(axis=1))
        self.skew = (e**3).mean(axis=1) / self.spread**3
        self.acceleration = (e**3).sum(axis=1) / (6.0 * (e**2).sum(axis=1) ** 1.5)
        # The package's own resamples, so that `check` can be exact. Float32 halves the time; what it loses is far below
        # the error of the simulation.
        weights = np.concatenate(list(resample_counts(n, resamples, SEED))).astype(np.float32) / n
        z = (e / self.spread[:, None]).astype(np.float32)
        m1, m2, m3 = (np.asarray(z**k @ weights.T, dtype=np.float64) for k in (1, 2, 3))
        variance = np.maximum(m2 - m1**2, 1e-12)
        self.means = m1 * self.spread[:, None]
        self.spreads = np.sqrt(variance) * self.spread[:, None]
        self.skews = (m3 - 3.0 * m1 * m2 + 2.0 * m1**3) / variance**1.5


def percentile(d: Draws) -> Float:
    """Quantile of the resampled means."""
    return d.mean + np.quantile(d.means, 1.0 - TAIL, axis=1)


def bca(d: Draws) -> Float:
    """Quantile at the bias-corrected and accelerated level (Efron 1987)."""
    below = ((d.means < 0.0).mean(axis=1) + 0.5 * (d.means == 0.0).mean(axis=1)).clip(1e-6, 1 - 1e-6)
    z0 = norm.ppf(below)
    z = z0 + norm.ppf(1.0 - TAIL)
    levels = norm.cdf(z0 + z / (1.0 - d.acceleration * z))
    return d.mean + np.array([np.quantile(row, level) for row, level in zip(d.means, levels, strict=True)])


def studentised(d: Draws) -> Float:
    """Quantile of t* = (mean* - mean)/sd*."""
    return d.mean - np.quantile(d.means / d.spreads, TAIL, axis=1) * d.spread


def calibrated(d: Draws) -> Float:
    """The studentised bootstrap that the package computes: the heaviest item stands twice in the mean and its error."""
    top = d.x.max(axis=1)
    mean = (d.n * d.mean + top) / (d.n + 1)
    squares = d.n * (d.spread**2 + (d.mean - mean) ** 2) + (top - mean) ** 2
    t = np.quantile(d.means / d.spreads, UPPER_TAIL * TAIL, axis=1)
    return np.asarray(mean - t * np.sqrt(d.n * squares) / (d.n + 1))


def studentised_log(d: Draws) -> Float:
    """The studentised bootstrap of the mean's logarithm."""
    means = d.mean[:, None] + d.means
    t = np.log(means / d.mean[:, None]) / (d.spreads / means)
    return d.mean * np.exp(-np.quantile(t, TAIL, axis=1) * d.spread / d.mean)


def studentised_cube_root(d: Draws) -> Float:
    """The studentised bootstrap of the mean's cube root."""
    means, root = d.mean[:, None] + d.means, np.cbrt(d.mean)
    t = (np.cbrt(means) - root[:, None]) / (d.spreads * means ** (-2.0 / 3.0) / 3.0)
    return (root - np.quantile(t, TAIL, axis=1) * d.spread * d.mean ** (-2.0 / 3.0) / 3.0) ** 3


def johnson(d: Draws) -> Float:
    """Johnson's modified t (1978): Student's t with the skewness's shift, ``skew (1 + 2 t²) sd/(6 n)``."""
    t = student.ppf(1.0 - TAIL, d.n - 1)
    return d.mean + d.spread * (d.skew * (1.0 + 2.0 * t * t) / (6.0 * d.n) + t / np.sqrt(d.n - 1))


def hall(d: Draws) -> Float:
    """Bootstrap of Hall's monotone cubic transformation of t (1992)."""

    def transformed(t: Float, skew: Float) -> Float:
        return t + skew * t**2 / 3.0 + skew**2 * t**3 / 27.0 + skew / (6.0 * d.n)

    y = np.quantile(transformed(d.means / d.spreads, d.skews), TAIL, axis=1)
    t = 3.0 / d.skew * (np.cbrt(1.0 + d.skew * (y - d.skew / (6.0 * d.n))) - 1.0)
    return d.mean - t * d.spread


METHODS: dict[str, Callable[[Draws], Float]] = {
    "percentile": percentile,
    "BCa": bca,
    "Johnson's t": johnson,
    "Hall": hall,
    "studentised": studentised,
    "of the logarithm": studentised_log,
    "of the cube root": studentised_cube_root,
    "calibrated": calibrated,
}


def check(d: Draws, ends: Float) -> None:
    """Stop where the vectorised method is not what the package computes, but for float32."""
    for row in range(3):
        own = studentized_interval(d.x[row], resamples=d.means.shape[1], seed=SEED)
        if own is not None and not np.isclose(own.high, ends[row], rtol=1e-3):
            raise SystemExit(f"The package's interval ends at {own.high}, the study's at {ends[row]}")


def study(population: Float, n: int, draws: int, resamples: int) -> dict[str, str]:
    """Return the cells of one row of the table."""
    d, truth = Draws(population, n, draws, resamples), float(population.mean())
    ends = {name: method(d) for name, method in METHODS.items()}
    check(d, ends["calibrated"])
    width = np.maximum(ends["percentile"] - d.mean, 1e-300)
    cells = {}
    for name, end in ends.items():
        cells[name] = f"{100 * (end < truth).mean():.1f} / {np.median((end - d.mean) / width):.2f}"
    trusted = (d.x.max(axis=1) < GATED_TOP_PCT / 100 * d.x.sum(axis=1)) & (n >= GATED_DOCUMENTS)
    cells["trusted"] = f"{100 * trusted.mean():.0f}"
    cells["trusted and missed"] = f"{100 * (trusted & (ends['calibrated'] < truth)).mean():.1f}"
    clipped, few = np.minimum(population, CLIP), d.x[:BOUNDED]
    high = np.array([bounded_mean_interval(np.minimum(x, CLIP), high=CLIP).high for x in few])
    wider = np.median(high) / np.median(ends["calibrated"][:BOUNDED])
    cells["clipped mean"] = f"{100 * (high < clipped.mean()).mean():.1f} / {wider:.2f}"
    above = np.array([wilson(int((x > CLIP).sum()), n).high for x in d.x])
    cells["above the clip"] = f"{100 * (above < (population > CLIP).mean()).mean():.1f}"
    return cells


def main() -> None:
    """Print the table, one row per sample and size as soon as it is known, and what decides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=Path, default=STORED, help="KL per item; made where it does not exist")
    parser.add_argument("--draws", type=int, default=2000, help="samples per row (default: %(default)s)")
    parser.add_argument("--resamples", type=int, default=1000, help="resamples per sample (default: %(default)s)")
    parser.add_argument("--only", default="", help="comma-separated parts of the samples' names; all when empty")
    given = parser.parse_args()
    wanted = [part for part in given.only.split(",") if part]
    more = ("trusted", "trusted and missed", "clipped mean", "above the clip")
    header = ("sample", "largest item, %", "n", *METHODS, *more)
    print("|", " | ".join(header), "|\n|" + "---|" * len(header), flush=True)
    worst: dict[str, tuple[float, str]] = {}
    for name, population in samples(given.samples).items():
        if wanted and not any(part in name for part in wanted):
            continue
        top = 100 * population.max() / population.sum()
        for n in SIZES:
            if n > 2 * len(population):
                continue
            cells = study(population, n, given.draws, given.resamples)
            print("|", " | ".join((name, f"{top:.1f}", str(n), *cells.values())), "|", flush=True)
            for method in METHODS:
                misses = float(cells[method].split(" / ")[0])
                if n >= GATED_DOCUMENTS and top < 5.0 and misses > worst.get(method, (-1.0, ""))[0]:
                    worst[method] = (misses, f"{name} at n = {n}")
    for method, (misses, where) in worst.items():
        print(f"{method}: at most {misses} % upper misses at n >= 200 where no item holds 5 %, in {where}")


if __name__ == "__main__":
    main()
