"""How often a family of variants lets one through that is beyond a limit, and what the chosen one's upper ends hold.

Variants of one baseline are simulated on the same items: each item has a difficulty that all variants share (the row's
correlation), every variant is exactly at the limit of its gate, so that each pass is a wrong one. "one by one" reads
every interval as if the variant stood alone, "together" is what promote does. Of the variant with the smallest KL the
table says how far its mean lies below the truth, and how often its upper end is at least the truth.

Example
-------
python benchmarks/family_errors.py
"""

import argparse

import numpy as np
import numpy.typing as npt
from scipy.stats import norm

from mlflow_compress.decide.gates import Gate, published_gate
from mlflow_compress.decide.promotion import Candidate, decide
from mlflow_compress.metrics.stats.bootstrap import studentized_interval
from mlflow_compress.metrics.stats.intervals import paired_difference, wilson

Float = npt.NDArray[np.float64]
FLIPS, KL, DROP = (
    published_gate("distance/flips_pct", 5.0),
    published_gate("distance/kl_mean", 0.05),
    published_gate("quality/accuracy_delta", 2.0),
)


def levels(rng: np.random.Generator, variants: int, items: int, correlation: float) -> Float:
    """Return standard normal values of variants on items that share the correlation, shape (variants, items)."""
    shared = rng.standard_normal(items)
    return np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * rng.standard_normal((variants, items))


def flips(values: Float) -> list[dict[str, float]]:
    """Return what gates read of variants that change 5 % of the answers."""
    n = values.shape[1]
    changed = (values > norm.isf(0.05)).sum(axis=1)
    return [{FLIPS.value: 100 * k / n, FLIPS.metric: 100 * wilson(int(k), n).high} for k in changed]


def drops(values: Float) -> list[dict[str, float]]:
    """Return what gates read of variants that lose 4 % of the answers and gain 2 %."""
    n = values.shape[1]
    lost, gained = (values > norm.isf(0.04)).sum(axis=1), (values < norm.ppf(0.02)).sum(axis=1)
    return [
        {DROP.value: (g - k) / n, DROP.metric: -100 * paired_difference(int(g), int(k), n).low}
        for k, g in zip(lost, gained, strict=True)
    ]


def kls(values: Float, seed: int) -> list[dict[str, float]]:
    """Return what gates read of variants with a mean KL of 0.05 nats."""
    of_items = 0.05 * np.exp(values - 0.5)
    found = []
    for row in of_items:
        interval = studentized_interval(row, seed=seed, resamples=500)
        found.append({KL.value: float(row.mean()), KL.metric: interval.high})
    return found


def passes(variants: list[dict[str, float]], gate: Gate) -> tuple[bool, bool]:
    """Return whether any passes one by one, and together."""
    rest = {"size/bytes": 1.0, "size/ratio": 4.0, "distance/kl_mean": 0.05, "distance/flips_pct": 5.0}
    made = [
        Candidate(name=str(i), run_id=str(i), version=None, method="rtn", metrics={**rest, **found})
        for i, found in enumerate(variants)
    ]
    alone = any(check.passed for one in made for check in gate.checks(one.metrics))
    return alone, decide(made, [gate]).champion is not None


def main() -> None:
    """Print a row per gate, number of variants and correlation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000, help="simulated families")
    parser.add_argument("--items", type=int, default=1000, help="items of each evaluation")
    args = parser.parse_args()
    print(f"wrong passes in % of {args.draws:,} families, {args.items:,} items; all variants are at the limit")
    print(f"{'gate':>6} {'variants':>9} {'correlation':>12} {'one by one':>11} {'together':>9}")
    winners = []
    for n in (1, 10, 20):
        for correlation in (0.0, 0.5, 0.9):
            rng = np.random.default_rng(20261124)
            wrong = {"flips": np.zeros(2), "drop": np.zeros(2), "KL": np.zeros(2)}
            below, alone, together = 0.0, 0, 0
            for draw in range(args.draws):
                values = levels(rng, n, args.items, correlation)
                wrong["flips"] += passes(flips(values), FLIPS)
                wrong["drop"] += passes(drops(values), DROP)
                if draw % 4 == 0:  # the bootstrap takes its time
                    found = kls(values, draw)
                    wrong["KL"] += 4 * np.array(passes(found, KL))
                    best = min(found, key=lambda one: one[KL.value])
                    below += 1 - best[KL.value] / 0.05
                    end = KL.one_end(best)
                    alone, together = alone + (end.end >= 0.05), together + (end.for_all(n) >= 0.05)
            for gate, (one, all_) in ((gate, 100 * both / args.draws) for gate, both in wrong.items()):
                print(f"{gate:>6} {n:>9} {correlation:>12} {one:>11.1f} {all_:>9.1f}")
            share = 400 / args.draws
            winners.append((n, correlation, below * share, alone * share, together * share))
    print("\nthe variant with the smallest KL: its mean below the truth, and its upper end at the truth or above, in %")
    print(f"{'variants':>9} {'correlation':>12} {'mean below':>11} {'own end':>9} {'end for all':>12}")
    for n, correlation, low, own, every in winners:
        print(f"{n:>9} {correlation:>12} {low:>11.1f} {own:>9.1f} {every:>12.1f}")


if __name__ == "__main__":
    main()
