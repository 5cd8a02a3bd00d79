"""Whether intervals of drawn items hold where flips do not follow the lead: simulation with known truth.

Each draw takes as many items as the demo has, with replacement, and lets each flip with a known probability: "uniform"
the same for all, "lead" as `GUESS` expects by the lead, "half" the mean of both, each scaled to the share of flips in
the row. Then items are drawn as `items=300`, `width:1.5` or `auto` (the default policy without KL) draws them.
"covers" is how often the interval of flips and that of the accuracy change hold the truth (95 % are due), "off" the
mean error of flips in points, "width" that of the interval of flips in points.

Example
-------
python benchmarks/drawn_items.py --draws 1000
"""

import argparse
from dataclasses import replace

import numpy as np
from margin_sampling import STORED, drawn_rows, stored

from mlflow_compress.config.groups import SampleSize
from mlflow_compress.config.policy import Policy
from mlflow_compress.metrics.core.estimates import PairedDifference, Proportion
from mlflow_compress.metrics.core.metric_inputs import MetricSettings
from mlflow_compress.metrics.stats.flip_model import GUESS

SIZES = {
    "150": SampleSize(count=150),
    "300": SampleSize(count=300),
    "600": SampleSize(count=600),
    "width:1.5": SampleSize(width=1.5),
    "auto": SampleSize(policy=Policy(kl=None)),
}


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000, help="samples per row (default: %(default)s)")
    parser.add_argument("--items", default=",".join(SIZES), help="which sizes (default: %(default)s)")
    given = parser.parse_args()
    demo = next(one for one in stored(STORED) if one.model == "demo")
    n, sign = len(demo.lead), np.where(demo.before, -1.0, 1.0)
    by_lead = GUESS.probability(demo.lead)
    by_lead /= by_lead.mean()
    print("| flips follow | flips | items | covers flips | change | off | width | drawn |\n|" + "---|" * 8, flush=True)
    for follow, kind in (("uniform", np.ones(n)), ("half", (1 + by_lead) / 2), ("lead", by_lead)):
        for share in (0.004, 0.01, 0.024, 0.03, 0.05):
            p = share * kind
            truth = np.array([share, p @ sign / n])
            for name in given.items.split(","):
                covered, values, widths, taken = np.zeros(2), [], [], []
                for draw in range(given.draws):
                    rng = np.random.default_rng((draw, int(1e4 * share)))
                    rows = rng.integers(0, n, n)
                    before = demo.before[rows]
                    after = before ^ (rng.random(n) < p[rows])
                    one = replace(demo, lead=demo.lead[rows], before=before, after=after, kl=None)
                    some, now = drawn_rows(one, np.arange(n), SIZES[name], (draw, 1))
                    b, a, units = before[some], after[some], now.units(np.arange(len(some)))
                    estimates = Proportion.of(b != a, units), PairedDifference.of(b, a, units)
                    found = [one.at(MetricSettings(), 1.0) for one in estimates]
                    ends = np.array([ends for _, ends in found if ends is not None])
                    covered += (ends[:, 0] <= truth) & (truth <= ends[:, 1])
                    values.append(found[0][0])
                    widths.append(ends[0, 1] - ends[0, 0])
                    taken.append(len(some))
                cells = [f"{x:.1f}" for x in 100 * covered / given.draws]
                cells += [f"{100 * (np.mean(values) - share):+.2f}", f"{100 * np.mean(widths):.2f}"]
                cells.append(f"{np.mean(taken):,.0f}")
                print("|", " | ".join((follow, f"{100 * share:g} %", name, *cells)), "|", flush=True)


if __name__ == "__main__":
    main()
