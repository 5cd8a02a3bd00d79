"""What intervals, McNemar's test and the gate hold when items come in groups that share something.

Samples of groups are simulated: items with a chance of `--flips` of changing, whose correlation within a group is the
row's; a change goes for or against the variant, with the same correlation; a KL of ``exp(normal)`` whose logarithm has
it too; a normal change of the negative log-likelihood. As windows of documents these are a corpus's KL, whose interval
is the same, and its perplexity ratio. A second table has one long text with unknown documents, in which each window
depends on the one before. Each cell is what was meant for independent items, then what knows the groups: coverage of
the intervals in percent (95 is meant), false alarms of McNemar's test at 5 %, and wrong verdicts of a gate on flips at
an error of 5 % whose limit is a hair below, or above, the truth and that looks after every group.

Example
-------
python benchmarks/cluster_coverage.py
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from mlflow_compress.metrics import MetricSettings
from mlflow_compress.metrics.core.estimates import Estimate, Mean, PairedDifference, Proportion, Ratio
from mlflow_compress.metrics.kl_tail import CLIP
from mlflow_compress.metrics.stats.intervals import FEWEST_GROUPS, group_sums
from mlflow_compress.metrics.stats.sequential import BoundedCheck, ItemGroups, p_values, verdicts

Float, Int = npt.NDArray[np.float64], npt.NDArray[np.int64]
Sample = Iterator[tuple[str, bool, bool]]
CORRELATIONS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
LAYOUTS = {"40 x 10": (40, 10, 10), "40 x 1-40": (40, 1, 40), "100 x 10": (100, 10, 10), "100 x 1-40": (100, 1, 40)}
SETTINGS = MetricSettings(resamples=1000)
CHANGE = 0.01  # of the negative log-likelihood, in nats per token
TEXTS = (600, 2400)  # windows
ERROR, HAIR = 0.05, 0.0005  # of the gate, and what its limit is off the truth


def chances(rng: np.random.Generator, share: float, correlation: float, count: int) -> Float:
    """Return a chance per group, so that two items of a group have the correlation (beta-binomial)."""
    if correlation == 0.0:
        return np.full(count, share)
    sure = 1.0 / correlation - 1.0
    return rng.beta(share * sure, (1.0 - share) * sure, count)


def covers(estimate: Estimate, truth: float) -> bool:
    """Return whether the interval holds the truth."""
    interval = estimate.at(SETTINGS, 1.0)[1]
    return interval is not None and bool(interval[0] <= truth <= interval[1])


def perplexity_ratio(nll: Float, documents: Int | None) -> Ratio:
    """Return the estimate from the change of each window's negative log-likelihood; windows have as many tokens."""
    return Ratio(*group_sums(nll, np.arange(len(nll)) if documents is None else documents), math.exp)


def gate_errs(flips: Float, truth: float, groups: ItemGroups | None) -> bool:
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


def draw(
    rng: np.random.Generator, layout: tuple[int, int, int], share: float, correlation: float, spread: float
) -> Sample:
    """Iterate over what is checked in one sample: its name, and what holds without groups and with them."""
    count, least, most = layout
    sizes = rng.integers(least, most + 1, count)
    groups: Int = np.repeat(np.arange(count), sizes)
    flips = rng.random(len(groups)) < np.repeat(chances(rng, share, correlation, count), sizes)
    gains = flips & (rng.random(len(groups)) < np.repeat(chances(rng, 0.5, correlation, count), sizes))
    log = np.sqrt(correlation) * np.repeat(rng.standard_normal(count), sizes)
    kl = 0.02 * np.exp(spread * (log + np.sqrt(1.0 - correlation) * rng.standard_normal(len(groups))))
    mean = 0.02 * np.exp(spread**2 / 2.0)  # of the clipped KL too, but for one value in ten thousand
    [own] = rng.spawn(1)
    nll = CHANGE + 0.05 * (log + np.sqrt(1.0 - correlation) * own.standard_normal(len(groups)))
    for name, truth, of in (
        ("flips", share, lambda g: Proportion.of(flips, g)),
        ("accuracy change", 0.0, lambda g: PairedDifference.of(flips & ~gains, gains, g)),
        ("mean KL", mean, lambda g: Mean(kl, skewed=True, groups=g)),
        ("perplexity ratio", np.exp(CHANGE), lambda g: perplexity_ratio(nll, g)),
        ("clipped KL", mean, lambda g: Mean(np.minimum(kl, CLIP), groups=g, bounds=(0.0, CLIP))),
    ):
        yield name, covers(of(None), truth), covers(of(groups), truth)
    alarms = [PairedDifference.of(flips & ~gains, gains, g).p_value.value < 0.05 for g in (None, groups)]
    yield "McNemar, false alarms", *alarms
    order = rng.permutation(count)
    rows = np.concatenate([np.flatnonzero(groups == group) for group in order])
    known = ItemGroups(groups[rows], int(sizes.max()))
    x = flips[rows].astype(np.float64)
    yield "gate, wrong verdicts", gate_errs(x, share, None), gate_errs(x, share, known)


def draw_text(rng: np.random.Generator, n_windows: int, correlation: float, spread: float) -> Sample:
    """Iterate over the same for one text of unknown documents, whose neighbouring windows are correlated."""
    noise = rng.standard_normal((2, n_windows)) * np.sqrt(1.0 - correlation**2)
    noise[:, 0] = rng.standard_normal(2)
    for here in range(1, n_windows):
        noise[:, here] += correlation * noise[:, here - 1]
    kl, nll = 0.02 * np.exp(spread * noise[0]), CHANGE + 0.05 * noise[1]
    stretches = np.arange(n_windows) * FEWEST_GROUPS // n_windows
    mean = 0.02 * np.exp(spread**2 / 2.0)
    for name, truth, of in (
        ("corpus KL", mean, lambda g: Mean(kl, skewed=True, groups=g)),
        ("perplexity ratio", math.exp(CHANGE), lambda g: perplexity_ratio(nll, g)),
    ):
        yield name, covers(of(None), truth), covers(of(stretches), truth)


def print_table(settings: Mapping[str, Callable[[np.random.Generator], Sample]], draws: int) -> None:
    """Print a row for each setting, whose key are its first cells, and the extremes of each column."""
    extremes: dict[str, list[float]] = defaultdict(list)
    for cells, sample in settings.items():
        rng = np.random.default_rng(7)
        held: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
        for _ in range(draws):
            for name, alone, grouped in sample(rng):
                held[name].append((alone, grouped))
        shares = {name: 100.0 * np.mean(of_name, axis=0) for name, of_name in held.items()}
        if not extremes:
            print("| groups | correlation |", " | ".join(shares), "|\n|" + "---|" * (len(shares) + 2))
        print(f"| {cells} |", " | ".join(f"{a:.1f} -> {g:.1f}" for a, g in shares.values()), "|", flush=True)
        for name, (_, grouped) in shares.items():
            extremes[name].append(grouped)
    for name, values in extremes.items():
        print(f"{name}: {min(values):.1f} to {max(values):.1f} %")
    print()


def main() -> None:
    """Print one row per layout and correlation, and the extremes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000, help="samples per row (default: %(default)s)")
    parser.add_argument("--flips", type=float, default=0.05, help="share of items that change (default: %(default)s)")
    parser.add_argument("--spread", type=float, default=1.0, help="of the KL's logarithm (default: %(default)s)")
    given = parser.parse_args()
    print_table(
        {
            f"{layout} | {correlation}": partial(
                draw, layout=shape, share=given.flips, correlation=correlation, spread=given.spread
            )
            for layout, shape in LAYOUTS.items()
            for correlation in CORRELATIONS
        },
        given.draws,
    )
    print_table(
        {
            f"one text of {n:,} windows | {correlation}": partial(
                draw_text, n_windows=n, correlation=correlation, spread=given.spread
            )
            for n in TEXTS
            for correlation in CORRELATIONS
        },
        given.draws,
    )


if __name__ == "__main__":
    main()
