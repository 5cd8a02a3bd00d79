"""Whether intervals hold at the edge: coverage, wrong passes and widths by simulation, with known truth.

Every row draws samples from a distribution whose mean is known, and computes the package's interval of each, by the
estimate that reports call. "below" and "above" are the percentages of samples whose whole interval lies below, or
above, the truth (2.5 each are due): so often a gate "at most", or "at least", the truth passes. "none" is that of
samples without an interval; the other percentages are of those with one. "rival" is the narrowest other interval that
covers 93 % of the same samples, and its width over the package's: Wilson's and Clopper and Pearson's of shares,
Student's (of groups: of their residuals, CR1), the jackknife's with Student's quantile (CR3), and of groups the wild
cluster bootstrap's with Webb's weights. A second table has shares of samples that tests and sequential gates get wrong.

Example
-------
python benchmarks/interval_edges.py --draws 2000 --parts groups,texts
"""

import argparse
import math
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from mlflow_compress.metrics.core.estimates import Estimate, Mean, PairedDifference, Proportion, Ratio
from mlflow_compress.metrics.core.metric_inputs import MetricSettings
from mlflow_compress.metrics.core.token_groups import documents_of
from mlflow_compress.metrics.judge_scores import score_interval
from mlflow_compress.metrics.kl_tail import mean_kl
from mlflow_compress.metrics.order import drop_change, drop_of
from mlflow_compress.metrics.stats.bootstrap import jackknife_interval, ratio
from mlflow_compress.metrics.stats.intervals import Interval, group_sums, wilson
from mlflow_compress.metrics.stats.sequential import BoundedCheck, ItemGroups, p_values, verdicts

Float, Int = npt.NDArray[np.float64], npt.NDArray[np.int64]
Ends = tuple[float, float] | None
Found = dict[str, Ends]
SETTINGS = MetricSettings(resamples=1000)
SHARE = (0.0, 1.0)
SIZES = (20, 60, 300, 1000, 3000)
VALID = 93.0  # percent that a rival must cover
MAX_KL, MAX_ABOVE = 0.05, 0.01
ERROR, HAIR = 0.05, 0.0005  # of the sequential gate, and what its limit is off the truth


class Row(NamedTuple):
    """What is simulated: the truth, and a sample's intervals, of which the first is the package's."""

    what: str
    setting: str
    truth: float
    draw: Callable[[np.random.Generator], Found]


def _ends(estimate: Estimate) -> Ends:
    return estimate.at(SETTINGS, 1.0)[1]


@lru_cache
def _webb(count: int) -> Float:
    """Return Webb's six-point weights of 399 resamples, shape (399, count)."""
    points = np.sqrt([0.5, 1.0, 1.5])
    return np.random.default_rng(0).choice(np.r_[-points, points], (399, count))


def rivals(sums: Float, sizes: Float | None = None) -> Found:
    """Return other intervals of a mean of items, or of sums over groups of so many items."""
    n = np.ones(len(sums)) if sizes is None else sizes
    total, count = n.sum(), len(n)
    mean = float(sums.sum() / total)
    e = sums - mean * n
    error, t = float(np.sqrt(count / (count - 1) * (e @ e)) / total), float(special.stdtrit(count - 1, 0.975))
    found: Found = {"Student": (mean - t * error, mean + t * error)}
    if sizes is not None and e.any():
        found["jackknife"] = jackknife_interval(np.column_stack([sums, n]), ratio, level=0.95)
        w = _webb(count)
        off = w @ e / total
        spread = w**2 @ e**2 - 2 * off * (w @ (e * n)) + off**2 * (n @ n)
        with np.errstate(divide="ignore", invalid="ignore"):
            low, high = np.nanquantile(off * total / np.sqrt(np.maximum(spread, 0.0)), [0.025, 0.975])
        found["wild"] = (mean - high * math.sqrt(e @ e) / total, mean - low * math.sqrt(e @ e) / total)
    return found


@cache
def of_share(hits: int, n: int) -> Found:
    """Return the intervals of a share."""
    rare = min(hits, n - hits)
    low = float(special.betaincinv(rare, n - rare + 1, 0.025)) if rare else 0.0
    exact = (low, float(special.betaincinv(rare + 1, n - rare, 0.975)))
    own = _ends(Mean(np.repeat([1.0, 0.0], [hits, n - hits]), bounds=SHARE))
    return {
        "": own,
        "Wilson": wilson(hits, n),
        "Clopper-Pearson": exact if hits == rare else (1 - exact[1], 1 - exact[0]),
    }


@cache
def of_change(gained: int, lost: int, n: int) -> Found:
    """Return the intervals of a change of accuracy."""
    change = np.repeat([1.0, -1.0, 0.0], [gained, lost, n - gained - lost])
    return {"": _ends(PairedDifference(gained, lost, n)), **rivals(change)}


def shares() -> Iterator[Row]:
    """Yield means of shares: all 0 or 1, and of several tokens an item; and changes of accuracy."""
    for truth, n in [(t, n) for t in (0.5, 0.8, 0.95, 0.98, 0.995, 0.998) for n in SIZES]:

        def share(rng: np.random.Generator, truth: float = truth, n: int = n) -> Found:
            return of_share(int(rng.binomial(n, truth)), n)

        yield Row("share of items, 0 or 1", f"{100 * truth:g} %, n = {n}", truth, share)
    for flips, n in [(f, n) for f in (0.005, 0.05, 0.2, 0.5) for n in SIZES]:
        for down in (0.5, 0.8):

            def change(rng: np.random.Generator, flips: float = flips, n: int = n, down: float = down) -> Found:
                gained, lost, _ = rng.multinomial(n, [flips * (1 - down), flips * down, 1 - flips])
                return of_change(int(gained), int(lost), n)

            setting = f"{100 * flips:g} % flip, {100 * down:g} % of them to wrong, n = {n}"
            yield Row("change of accuracy", setting, flips * (1 - 2 * down), change)
    for truth, n in [(t, n) for t in (0.9, 0.995) for n in SIZES]:

        def tokens(rng: np.random.Generator, truth: float = truth, n: int = n) -> Found:
            values = 1 - rng.binomial(8, 0.3, n) / 8 * (rng.random(n) < (1 - truth) / 0.3)
            return {"": _ends(Mean(values, bounds=SHARE)), **rivals(values)}

        yield Row("share of an item's 8 tokens, in runs", f"{100 * truth:g} %, n = {n}", truth, tokens)


RARE = {"0.5 % at 4 nats": (0.005, 4.0), "0.2 % at 10 nats": (0.002, 10.0), "3 % at 0.9 nats": (0.03, 0.9)}
KLS = (*RARE, "lognormal, sigma 1", "lognormal, sigma 2")


def _kl(kind: str, u: Float) -> Float:
    """Return KLs whose mean, clipped at 1 nat, is the limit, from uniform variables."""
    if kind in RARE:
        share, size = RARE[kind]
        return np.where(u > 1 - share, size, (MAX_KL - share * min(size, 1)) / (1 - share))
    sigma = float(kind.rpartition(" ")[2])
    return np.exp(_location(sigma) + sigma * ndtri(u))


@lru_cache
def _location(sigma: float) -> float:
    """Return the mean logarithm of a lognormal variable whose mean, clipped at 1, is the limit."""
    even = np.exp(sigma * ndtri((np.arange(200_000) + 0.5) / 200_000))
    return float(brentq(lambda at: np.minimum(np.exp(at) * even, 1).mean() - MAX_KL, -20.0, 5.0))


def kl() -> Iterator[Row]:
    """Yield the mean of the clipped KL, which is at the default policy's limit, and the mean that stands in its place.

    The mean KL has the interval of the clipped mean where no item is above the clip, and none elsewhere.
    """
    for kind, n in [(k, n) for k in KLS for n in SIZES[1:]]:

        def clipped(rng: np.random.Generator, kind: str = kind, n: int = n) -> Found:
            values = np.minimum(_kl(kind, rng.random(n)), 1)
            return {"": _ends(Mean(values, bounds=SHARE)), **rivals(values)}

        yield Row("clipped KL", f"{kind}, n = {n}", MAX_KL, clipped)

        def mean(rng: np.random.Generator, kind: str = kind, n: int = n) -> Found:
            return {"": _ends(mean_kl(_kl(kind, rng.random(n)), None))}

        yield Row("mean KL with an interval, clipped truth", f"{kind}, n = {n}", MAX_KL, mean)


def shuffles() -> Iterator[Row]:
    """Yield the accuracy lost under shuffled answers and its change: 70 % right, of which a part is lost."""

    def right(rng: np.random.Generator, n: int, lost: float) -> Float:
        before = rng.random(n) < 0.7
        return np.column_stack([before, before & (rng.random(n) >= lost)]).astype(np.float64)

    for lost, n in [(x, n) for x in (0.005, 0.05, 0.2) for n in SIZES[1:]]:

        def one(rng: np.random.Generator, lost: float = lost, n: int = n) -> Found:
            return {"": _ends(drop_of(right(rng, n, lost), np.arange(n), SETTINGS))}

        def change(rng: np.random.Generator, lost: float = lost, n: int = n) -> Found:
            return {"": _ends(drop_change(right(rng, n, lost), right(rng, n, lost), np.arange(n)))}

        yield Row("lost under shuffled answers", f"{100 * lost:g} %, n = {n}", 100 * lost, one)
        yield Row("its change", f"{100 * lost:g} % in both, n = {n}", 0.0, change)


STEPS = np.array([-4.0, -2, -1, 1, 2, 3])
OFTEN = np.array([0.05, 0.15, 0.35, 0.3, 0.1, 0.05])


def _grades(values: Float, bounds: Interval) -> Found:
    own = score_interval(values, np.ones(len(values), dtype=np.int64), bounds=bounds, level=SETTINGS.level)
    return {"": own, **rivals(values)}


def judged() -> Iterator[Row]:
    """Yield a judge's mean grade, the mean difference of two models' grades, and the mean of cosines near 1."""
    values = np.array([1, 3, 5, 7, 8, 9, 10.0])
    weights = np.array([0.04, 0.06, 0.1, 0.2, 0.3, 0.25, 0.05])
    for n in (5, 10, 20, 80):

        def mean(rng: np.random.Generator, n: int = n) -> Found:
            return _grades(rng.choice(values, n, p=weights), Interval(1, 10))

        yield Row("judge's mean grade", f"n = {n}", float(values @ weights), mean)
    for share, n in [(s, n) for s in (0.03, 0.1, 0.3, 0.6) for n in (20, 48, 80, 300)]:

        def difference(rng: np.random.Generator, share: float = share, n: int = n) -> Found:
            return _grades(rng.choice(STEPS, n, p=OFTEN) * (rng.random(n) < share), Interval(-9, 9))

        setting = f"{100 * share:g} % differ, n = {n}"
        yield Row("judge's difference of grades", setting, float(STEPS @ OFTEN) * share, difference)
    for shape, n in [(s, n) for s in (0.5, 2.0) for n in SIZES]:

        def near(rng: np.random.Generator, n: int = n, shape: float = shape) -> Found:
            far = rng.gamma(shape, 0.1 / shape, n)
            return {"": SETTINGS.skewed_interval(far), **rivals(far)}

        yield Row("1 - similarity", f"gamma {shape:g}, n = {n}", 0.1, near)


def group_sizes(kind: str, count: int, n: int) -> Int:
    """Return sizes of `count` groups that have `n` items in all."""
    share = {
        "equal": np.ones(count),
        "1 to 40": np.linspace(1, 40, count),
        "geometric": 0.9 ** np.arange(count) * 1e3 + 1,
        "one of 30 %": np.r_[0.3, np.full(count - 1, 0.7 / (count - 1))],
    }[kind]
    return np.maximum(np.round(n * share / share.sum()), 1).astype(np.int64)


LAYOUTS = [(k, c) for k in ("equal", "1 to 40", "geometric", "one of 30 %") for c in (8, 20, 25, 75, 300)]


def chances(rng: np.random.Generator, share: float, correlation: float, count: int) -> Float:
    """Return a chance per group, so that two items of a group have the correlation (beta-binomial)."""
    if correlation == 0.0:
        return np.full(count, share)
    sure = 1.0 / correlation - 1.0
    return rng.beta(share * sure, (1.0 - share) * sure, count)


def _changed(rng: np.random.Generator, groups: Int, share: float, rho: float) -> npt.NDArray[np.bool_]:
    count = int(groups[-1]) + 1
    return np.asarray(rng.random(len(groups)) < chances(rng, share, rho, count)[groups])


def groups() -> Iterator[Row]:
    """Yield flips, changes of accuracy and clipped KL of items that are alike within a group."""
    for rho, share, (kind, count) in [(r, s, x) for r in (0.2, 0.5) for s in (0.02, 0.05, 0.2) for x in LAYOUTS]:
        of_item = np.repeat(np.arange(count), sizes := group_sizes(kind, count, max(10 * count, 600)))

        def flips(rng: np.random.Generator, g: Int = of_item, share: float = share, rho: float = rho) -> Found:
            hits = _changed(rng, g, share, rho)
            return {"": _ends(Proportion.of(hits, g)), **rivals(*group_sums(hits, g))}

        def change(rng: np.random.Generator, g: Int = of_item, share: float = share, rho: float = rho) -> Found:
            hits = _changed(rng, g, share, rho)
            gained = hits & _changed(rng, g, 0.5, rho)
            own = _ends(PairedDifference.of(hits & ~gained, gained, g))
            return {"": own, **rivals(*group_sums(gained.astype(np.int64) * 2 - hits, g))}

        setting = f"{100 * share:g} %, {count} groups, {kind}, rho {rho}"
        yield Row("flips, in groups", setting, share, flips)
        yield Row("change of accuracy, in groups", setting, 0.0, change)
    for kind, count in LAYOUTS:
        of_item = np.repeat(np.arange(count), sizes := group_sizes(kind, count, max(10 * count, 600)))

        def clipped(rng: np.random.Generator, g: Int = of_item) -> Found:
            z = np.sqrt(0.3) * rng.standard_normal(int(g[-1]) + 1)[g] + np.sqrt(0.7) * rng.standard_normal(len(g))
            values = np.minimum(_kl("lognormal, sigma 1", ndtr(z)), 1)
            return {"": _ends(Mean(values, bounds=SHARE, groups=g)), **rivals(*group_sums(values, g))}

        yield Row("clipped KL, in groups", f"lognormal, sigma 1, {count} groups, {kind}", MAX_KL, clipped)
    for sigma, (kind, count) in [(s, x) for s in (0.5, 1.0, 1.5) for x in LAYOUTS]:
        sizes = group_sizes(kind, count, max(10 * count, 600)).astype(np.float64)
        shape = sizes / (math.exp(0.25) - 1)  # a window's own factor has a log-variance of 1/4

        def corpus(rng: np.random.Generator, n: Float = sizes, shape: Float = shape, sigma: float = sigma) -> Found:
            means = np.exp(sigma * rng.standard_normal(len(n)) - sigma**2 / 2) * rng.gamma(shape, 1 / shape)
            return {"": _ends(Ratio(means * n, n)), **rivals(means * n, n)}

        def perplexity(rng: np.random.Generator, n: Float = sizes, sigma: float = sigma) -> Found:
            nll = sigma * rng.standard_normal(len(n)) + rng.standard_normal(len(n)) / np.sqrt(n)
            return {"": _ends(Ratio(nll * n, n)), **rivals(nll * n, n)}

        setting = f"{count} documents, {kind}, sd {sigma:g} between them"
        yield Row("corpus KL", setting, 1.0, corpus)
        if sigma == 1.0:
            yield Row("logarithm of a perplexity ratio", setting, 0.0, perplexity)


def texts() -> Iterator[Row]:
    """Yield the corpus KL of one text whose documents are not known."""
    for longest, n in [(m, n) for m in (1, 40, 200) for n in (500, 1000, 3000, 5000, 10000)]:
        stretch = documents_of(np.arange(n).astype(str).astype(object))

        def text(rng: np.random.Generator, longest: int = longest, n: int = n, stretch: Int = stretch) -> Found:
            lengths = np.exp(rng.uniform(0, math.log(longest + 1), n)).astype(np.int64)
            document = np.repeat(np.arange(n), lengths)[:n]
            z = np.sqrt(0.5) * (rng.standard_normal(n)[document] + rng.standard_normal(n))
            sums, sizes = group_sums(np.exp(z - 0.5), stretch)
            return {"": _ends(Ratio(sums, sizes)), **(rivals(sums, sizes) if len(sums) > 1 else {})}

        yield Row("corpus KL, unknown documents", f"of 1 to {longest} windows, {n:,} in all", 1.0, text)


PARTS = {"shares": shares, "kl": kl, "shuffles": shuffles, "judged": judged, "groups": groups, "texts": texts}


def _gate_errs(flips: Float, truth: float, groups: ItemGroups | None) -> bool:
    """Return whether a gate that looks all the time ever gives a wrong verdict."""
    for limit, wrong in ((truth - HAIR, "pass"), (truth + HAIR, "fail")):
        paths = p_values(BoundedCheck(name="flips", limit=limit), flips, groups, error=ERROR, n_checks=1)
        decided = (
            verdict
            for against_wrong, against_right in zip(*paths, strict=True)
            for verdict in verdicts([against_wrong], [against_right], error=ERROR)
        )
        if next((verdict for verdict in decided if verdict != "undecided"), None) == wrong:
            return True
    return False


def _policy_passes(rng: np.random.Generator, kind: str, n: int) -> bool:
    kl = _kl(kind, rng.random(n))
    high, above = _ends(Mean(np.minimum(kl, 1), bounds=SHARE)), of_share(int((kl > 1).sum()), n)[""]
    assert high is not None and above is not None
    return high[1] <= MAX_KL and above[1] <= MAX_ABOVE and bool(kl.mean() <= MAX_KL)


def _alarm(rng: np.random.Generator, of_item: Int, rho: float) -> bool:
    hits = _changed(rng, of_item, 0.05, rho)
    gained = hits & _changed(rng, of_item, 0.5, rho)
    return PairedDifference.of(hits & ~gained, gained, of_item).p_value.value < 0.05


def _sequential(rng: np.random.Generator, count: int, least: int, rho: float) -> bool:
    sizes = rng.integers(least, 41 if least == 1 else least + 1, count)
    of_item = np.repeat(np.arange(count), sizes)
    hits = _changed(rng, of_item, 0.05, rho)
    return _gate_errs(hits.astype(np.float64), 0.05, ItemGroups(of_item, int(sizes.max())))


def tests() -> Iterator[tuple[str, str, float, int, Callable[[np.random.Generator], bool]]]:
    """Yield what is wrong, the percentage that is allowed, by what the draws are divided, and a sample's verdict."""
    for kind, n in [(k, n) for k in KLS for n in SIZES[2:]]:
        name = f"clipped mean at the limit: {kind}, n = {n}"
        yield "KL gates of the default policy pass", name, 2.5, 1, partial(_policy_passes, kind=kind, n=n)
    for rho, (kind, count) in [(r, x) for r in (0.2, 0.5) for x in LAYOUTS if x[1] in (25, 300)]:
        of_item = np.repeat(np.arange(count), group_sizes(kind, count, max(10 * count, 600)))
        name = f"{count} groups, {kind}, rho {rho}"
        yield "McNemar's test of equal models rejects", name, 5.0, 1, partial(_alarm, of_item=of_item, rho=rho)
    for rho, count, least in [(r, c, n) for r in (0.0, 0.2, 0.5) for c in (40, 100) for n in (10, 1)]:
        name = f"5 % flip, {count} groups of {'1 to 40' if least == 1 else least}, rho {rho}"
        yield "sequential gate", name, 5.0, 10, partial(_sequential, count=count, least=least, rho=rho)


def simulate(row: Row, draws: int) -> str:
    """Return one line of the table."""
    rng = np.random.default_rng(0)
    found = [row.draw(rng) for _ in range(draws)]

    def judged(name: str) -> tuple[float, float, float, float]:
        """Return the percentages below and above the truth and of none, and the median width."""
        ends = np.array([ends for one in found if (ends := one.get(name)) is not None]).reshape(-1, 2)
        if not len(ends):
            return math.nan, math.nan, 100.0, math.nan
        below, above = (ends[:, 1] < row.truth - 1e-12).mean(), (ends[:, 0] > row.truth + 1e-12).mean()
        width = np.median(ends[:, 1] - ends[:, 0])
        return 100 * float(below), 100 * float(above), 100 * (1 - len(ends) / draws), float(width)

    below, above, none, width = judged("")
    if none == 100.0:
        cells = ("", "", "", "100", "", "")
    else:
        others = {name: judged(name) for name in found[0] if name}
        valid = [(one[3] / width, name) for name, one in others.items() if 100 - one[0] - one[1] >= VALID]
        rival = f"{min(valid)[1]} {min(valid)[0]:.2f}" if valid else "none" if others else ""
        numbers = (f"{100 - below - above:.1f}", f"{below:.1f}", f"{above:.1f}")
        cells = (*numbers, f"{none:.0f}", f"{width:.3g}", rival)
    return f"| {' | '.join((row.what, row.setting, *cells))} |"


def main() -> None:
    """Print one table of intervals and one of tests, each row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000, help="samples per row (default: %(default)s)")
    parser.add_argument("--parts", default=",".join((*PARTS, "tests")), help="which parts (default: %(default)s)")
    given = parser.parse_args()
    parts = given.parts.split(",")
    if rest := [part for part in parts if part != "tests"]:
        header = "what | truth and sample | covers | below | above | none | median width | rival"
        print(f"| {header} |\n|" + "---|" * 8, flush=True)
        for row in (row for part in rest for row in PARTS[part]()):
            print(simulate(row, given.draws), flush=True)
    if "tests" in parts:
        print("\n| what | truth and sample | allowed | of | wrong |\n|" + "---|" * 5, flush=True)
        for what, setting, allowed, fewer, wrong in tests():
            rng, draws = np.random.default_rng(0), max(given.draws // fewer, 1)
            share = 100 * float(np.mean([wrong(rng) for _ in range(draws)]))
            print(f"| {what} | {setting} | {allowed:g} | {draws:,} | {share:.1f} |", flush=True)


if __name__ == "__main__":
    main()
