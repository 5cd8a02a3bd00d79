"""Whether "about N items would settle it" holds: simulation with known truth.

A first sample is drawn. Where it is open, and a number N is told, N fresh items are drawn: "settled" is the percentage
of these that are not open, or pass. "told" is the percentage of the open samples with a number; the others say "more
than 10 times as many". 80 % are promised. For the direction of the accuracy change they are promised at every change.
For a gate they are promised averaged over the truths that the first sample leaves open; therefore the rows "any" draw
the truth anew in every sample, uniformly from 0 to twice the limit.

Example
-------
python benchmarks/items_to_settle.py --draws 1000
"""

import argparse
import math

import numpy as np

from mlflow_compress.decide.direction import HarmVerdict, harm_verdict
from mlflow_compress.metrics.stats.intervals import paired_difference, wilson
from mlflow_compress.metrics.stats.sample_size import times_for_share

CHANGES = [
    *((flips, change) for flips in (5.0, 10.0, 2.0) for change in (0.0, -0.3, -0.4, -0.5, -0.8)),
    *((flips, change) for flips in (0.4, 0.5) for change in (0.0, -0.2)),
]
SHARES = [(limit, truth) for limit in (5.0, 1.0) for truth in (0.4, 0.6, 0.8, None)]  # of the limit


def direction(rng: np.random.Generator, change: float, flips: float, n: int) -> HarmVerdict:
    """Return the verdict on n items with this true change and share of flips, in percent; the margin is 1 point."""
    lost, gained = rng.multinomial(n, [(flips - change) / 200, (flips + change) / 200, 1 - flips / 100])[:2]
    ends = paired_difference(gained, lost, n)
    return harm_verdict((gained - lost) / n, *ends, discordant=(gained + lost) / n, n=n, margin=1.0)


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000, help="first samples per row (default: %(default)s)")
    draws = parser.parse_args().draws
    print("| what | truth | first items | open | told | median N | settled |\n|" + "---|" * 7, flush=True)

    def show(what: str, truth: str, first: int, planned: list[float], settled: list[bool]) -> None:
        told = [n for n in planned if math.isfinite(n)]
        middle, share = (f"{np.median(told):,.0f}", f"{100 * np.mean(settled):.0f}") if told else ("", "")
        percent = 100 * len(told) / max(len(planned), 1)
        row = what, truth, f"{first:,}", f"{100 * len(planned) / draws:.0f}", f"{percent:.0f}", middle, share
        print("|", " | ".join(row), "|", flush=True)

    for flips, change in CHANGES:
        for first in (300, 1000):
            rng = np.random.default_rng(first)
            verdicts = [direction(rng, change, flips, first) for _ in range(draws)]
            planned = [float(one.items) for one in verdicts if one.items is not None]
            settled = [direction(rng, change, flips, int(n)).word != "open" for n in planned]
            show("direction", f"change {change:g}, flips {flips:g} %", first, planned, settled)
    for limit, part in SHARES:
        for first in (300, 1000, 3000):
            rng = np.random.default_rng(first)
            planned, settled = [], []
            for _ in range(draws):
                truth = (rng.uniform(0, 2) if part is None else part) * limit / 100
                events = int(rng.binomial(first, truth))
                if events / first >= limit / 100 or wilson(events, first).high <= limit / 100:
                    continue
                planned.append(first * times_for_share(events / first, first, limit / 100))
                if math.isfinite(planned[-1]):
                    n = math.ceil(planned[-1])
                    settled.append(wilson(int(rng.binomial(n, truth)), n).high <= limit / 100)
            truth_text = "any" if part is None else f"{part * limit:g} %"
            show(f"gate on a share, limit {limit:g} %", truth_text, first, planned, settled)


if __name__ == "__main__":
    main()
