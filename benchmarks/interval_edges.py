"""Whether intervals hold where hardly anything differs: coverage and wrong passes by simulation, with known truth.

Every row draws samples from a distribution whose mean is known, and computes the package's interval of each. "below"
and "above" are the percentages of samples whose whole interval lies below, or above, the truth (2.5 each are due);
"none" is that of samples without an interval. "passes" is that of samples which pass a gate whose limit is the truth,
or which the truth breaks by as much as the row says.

Example
-------
python benchmarks/interval_edges.py --draws 1000
"""

import argparse
from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from mlflow_compress.metrics.core.estimates import Estimate, Mean, Proportion
from mlflow_compress.metrics.core.metric_inputs import MetricSettings
from mlflow_compress.metrics.judge_scores import score_interval
from mlflow_compress.metrics.order import drop_change, drop_of
from mlflow_compress.metrics.stats.intervals import Interval

Float = npt.NDArray[np.float64]
Ends = tuple[float, float] | None
Draw = Callable[[np.random.Generator], Ends]
SETTINGS = MetricSettings()
SHARE = (0.0, 1.0)
MAX_KL, MAX_ABOVE = 0.05, 0.01


def _ends(estimate: Estimate) -> Ends:
    return estimate.at(SETTINGS, 1.0)[1]


def group_sizes(kind: str, count: int, n: int) -> Float:
    """Return sizes of `count` groups that have `n` items in all."""
    share = {
        "equal": np.ones(count),
        "geometric": 0.9 ** np.arange(count) * 1e3 + 1,
        "one of 30 %": np.r_[0.3, np.full(count - 1, 0.7 / (count - 1))],
    }[kind]
    return np.maximum(np.round(n * share / share.sum()), 1)


def grouped(rng: np.random.Generator, sizes: Float, rho: float) -> tuple[Float, npt.NDArray[np.int64]]:
    """Return a uniform variable for each item, normal with correlation `rho` within a group, and the groups."""
    groups = np.repeat(np.arange(len(sizes)), sizes.astype(np.int64))
    z = np.sqrt(rho) * rng.normal(size=len(sizes))[groups] + np.sqrt(1 - rho) * rng.normal(size=len(groups))
    return ndtr(z), groups


def agreement() -> Iterator[tuple[str, str, float, Draw]]:
    """Yield means of shares: all 0 or 1, and of several tokens an item."""
    for truth, n in [(t, n) for t in (0.5, 0.98, 0.995, 0.998) for n in (20, 60, 300, 1000)]:
        yield (
            "share of items, 0 or 1",
            f"{100 * truth:g} %, n = {n}",
            truth,
            lambda rng, t=truth, n=n: _ends(Mean((rng.random(n) < t) * 1.0, bounds=SHARE)),
        )
    for truth, n in [(t, n) for t in (0.9, 0.995) for n in (20, 60, 300, 1000)]:
        yield (
            "share of an item's 8 tokens, in runs",
            f"{100 * truth:g} %, n = {n}",
            truth,
            lambda rng, t=truth, n=n: _ends(
                Mean(1 - rng.binomial(8, 0.3, n) / 8 * (rng.random(n) < (1 - t) / 0.3), bounds=SHARE)
            ),
        )
    for kind, count in [(k, c) for k in ("equal", "geometric", "one of 30 %") for c in (25, 75, 300)]:
        sizes = group_sizes(kind, count, 1500)

        def of_groups(rng: np.random.Generator, sizes: Float = sizes) -> Ends:
            u, groups = grouped(rng, sizes, 0.3)
            return _ends(Mean((u < 0.98) * 1.0, bounds=SHARE, groups=groups))

        yield "share of items, in groups, rho 0.3", f"98 %, {count} groups, {kind}", 0.98, of_groups


def _kl(kind: str, u: Float) -> Float:
    """Return KLs whose mean, clipped at 1 nat, is the limit, from uniform variables."""
    rare, size = {"0.5 % at 4 nats": (0.005, 4.0), "0.2 % at 10 nats": (0.002, 10.0)}.get(kind, (0.0, 0.0))
    if rare:
        return np.where(u > 1 - rare, size, (MAX_KL - rare) / (1 - rare))
    if kind == "3 % at 0.9 nats":
        return np.where(u > 0.97, 0.9, (MAX_KL - 0.027) / 0.97)
    sigma = float(kind.rpartition(" ")[2])
    return np.exp(_location(sigma) + sigma * ndtri(u))


@lru_cache
def _location(sigma: float) -> float:
    """Return the mean logarithm of a lognormal variable whose mean, clipped at 1, is the limit."""
    even = np.exp(sigma * ndtri((np.arange(200_000) + 0.5) / 200_000))
    return float(brentq(lambda at: np.minimum(np.exp(at) * even, 1).mean() - MAX_KL, -20.0, 5.0))


KLS = ("0.5 % at 4 nats", "0.2 % at 10 nats", "3 % at 0.9 nats", "lognormal, sigma 1", "lognormal, sigma 2")


def clipped() -> Iterator[tuple[str, str, float, Draw]]:
    """Yield the mean of the clipped KL, which is at the default policy's limit."""
    for kind, n in [(k, n) for k in KLS for n in (100, 200, 300, 1000)]:
        yield (
            "clipped KL",
            f"{kind}, n = {n}",
            MAX_KL,
            lambda rng, k=kind, n=n: _ends(Mean(np.minimum(_kl(k, rng.random(n)), 1), bounds=SHARE)),
        )
    for kind, count in [(k, c) for k in ("equal", "geometric", "one of 30 %") for c in (25, 75, 300)]:
        sizes = group_sizes(kind, count, 1500)

        def of_groups(rng: np.random.Generator, sizes: Float = sizes) -> Ends:
            u, groups = grouped(rng, sizes, 0.3)
            return _ends(Mean(np.minimum(_kl("lognormal, sigma 1", u), 1), bounds=SHARE, groups=groups))

        yield "clipped KL, in groups, rho 0.3", f"lognormal, sigma 1, {count} groups, {kind}", MAX_KL, of_groups


def shuffles() -> Iterator[tuple[str, str, float, Draw]]:
    """Yield the accuracy lost under shuffled answers and its change: 70 % right, of which a part is lost."""

    def right(rng: np.random.Generator, n: int, lost: float) -> Float:
        before = rng.random(n) < 0.7
        return np.column_stack([before, before & (rng.random(n) >= lost)]).astype(np.float64)

    for lost, n in [(x, n) for x in (0.005, 0.05, 0.2) for n in (60, 300, 1000)]:

        def one(rng: np.random.Generator, lost: float = lost, n: int = n) -> Ends:
            return _ends(drop_of(right(rng, n, lost), np.arange(n), SETTINGS))

        def change(rng: np.random.Generator, lost: float = lost, n: int = n) -> Ends:
            return _ends(drop_change(right(rng, n, lost), right(rng, n, lost), np.arange(n)))

        yield "lost under shuffled answers", f"{100 * lost:g} %, n = {n}", 100 * lost, one
        yield "its change", f"{100 * lost:g} % in both, n = {n}", 0.0, change


STEPS = np.array([-4.0, -2, -1, 1, 2, 3])
OFTEN = np.array([0.05, 0.15, 0.35, 0.3, 0.1, 0.05])


def _grades(values: Float, bounds: Interval) -> Ends:
    return score_interval(values, np.ones(len(values), dtype=np.int64), bounds=bounds, level=SETTINGS.level)


def grades() -> Iterator[tuple[str, str, float, Draw]]:
    """Yield a judge's mean grade, and the mean difference of two models' grades, most of which are 0."""
    values = np.array([1, 3, 5, 7, 8, 9, 10.0])
    weights = np.array([0.04, 0.06, 0.1, 0.2, 0.3, 0.25, 0.05])
    for n in (5, 10, 20, 80):
        yield (
            "judge's mean grade",
            f"n = {n}",
            float(values @ weights),
            lambda rng, n=n: _grades(rng.choice(values, n, p=weights), Interval(1, 10)),
        )
    for share, n in [(s, n) for s in (0.03, 0.1, 0.3, 0.6) for n in (20, 48, 80)]:
        yield (
            "judge's difference of grades",
            f"{100 * share:g} % differ, n = {n}",
            float(STEPS @ OFTEN) * share,
            lambda rng, s=share, n=n: _grades(rng.choice(STEPS, n, p=OFTEN) * (rng.random(n) < s), Interval(-9, 9)),
        )


def similarity() -> Iterator[tuple[str, str, float, Draw]]:
    """Yield the mean of cosines near 1, whose distance from 1 is gamma distributed."""
    for n in (20, 60, 300, 1000):
        for shape in (0.5, 2.0):

            def one(rng: np.random.Generator, n: int = n, shape: float = shape) -> Ends:
                far = SETTINGS.skewed_interval(rng.gamma(shape, 0.1 / shape, n))
                return None if far is None else (1 - far.high, 1 - far.low)

            yield "similarity", f"gamma {shape:g}, n = {n}", 0.9, one


def gates(draws: int) -> Iterator[tuple[str, str, float]]:
    """Yield how often the default gate on KL, and a gate of at least 99 % agreement, pass at or beyond the limit."""
    for kind, n in [(k, n) for k in KLS for n in (200, 300, 1000)]:
        passed, rng = 0, np.random.default_rng(n)
        for _ in range(draws):
            kl = _kl(kind, rng.random(n))
            high = Mean(np.minimum(kl, 1), bounds=SHARE).at(SETTINGS, 1.0)[1]
            above = Proportion.of(kl > 1).at(SETTINGS, 1.0)[1]
            assert high is not None and above is not None
            passed += high[1] <= MAX_KL and above[1] <= MAX_ABOVE and kl.mean() <= MAX_KL
        yield "KL of the default policy", f"clipped mean at the limit: {kind}, n = {n}", 100 * passed / draws
    for truth, n in [(t, n) for t in (0.99, 0.98) for n in (20, 60, 150, 400, 1000)]:
        hits = np.random.default_rng(n).binomial(n, truth, draws)
        low = [Mean(np.repeat([1.0, 0.0], [k, n - k]), bounds=SHARE).at(SETTINGS, 1.0)[1] for k in hits]
        passes = np.mean([ends is not None and ends[0] >= 0.99 for ends in low])
        yield "top1_agreement at least 99 %", f"truth {100 * truth:g} %, n = {n}", 100 * float(passes)


PARTS = {
    "agreement": agreement,
    "clipped": clipped,
    "shuffles": shuffles,
    "grades": grades,
    "similarity": similarity,
}


def main() -> None:
    """Print one table of intervals and one of gates, each row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000, help="samples per row (default: %(default)s)")
    parser.add_argument("--parts", default=",".join((*PARTS, "gates")), help="which parts (default: %(default)s)")
    given = parser.parse_args()
    parts = given.parts.split(",")
    if rest := [part for part in parts if part != "gates"]:
        print("| what | truth and sample | below | above | covers | none | median width |\n|" + "---|" * 7, flush=True)
        for what, setting, truth, draw in (row for part in rest for row in PARTS[part]()):
            rng = np.random.default_rng(0)
            ends = [draw(rng) for _ in range(given.draws)]
            known = np.array([pair for pair in ends if pair is not None])
            none = 100 * (1 - len(known) / given.draws)
            below, above = (100 * np.mean(side) for side in (known[:, 1] < truth - 1e-12, known[:, 0] > truth + 1e-12))
            width = np.median(known[:, 1] - known[:, 0])
            cells = (f"{below:.1f}", f"{above:.1f}", f"{100 - below - above:.1f}", f"{none:.0f}", f"{width:.3g}")
            print("|", " | ".join((what, setting, *cells)), "|", flush=True)
    if "gates" in parts:
        print("\n| gate | truth and sample | passes |\n|---|---|---|", flush=True)
        for what, setting, passes in gates(given.draws):
            print("|", " | ".join((what, setting, f"{passes:.1f}")), "|", flush=True)


if __name__ == "__main__":
    main()
