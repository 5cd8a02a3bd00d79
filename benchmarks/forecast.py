"""Forecasts of flips on benchmarks of another kind than those that a variant was run on, beside what flipped there.

python benchmarks/forecast.py --data_dir ../shared/hub

Six variants of the demo are evaluated on the demo's own tasks, in which options have up to a few tokens. ARC, PIQA and
Winogrande are whole sentences that the demo was not trained on: a forecast is made of each before it is run.
"""

import argparse

import numpy as np

import mlflow_compress as mc

VARIANTS = (("rtn", 4), ("gptq", 4), ("awq", 4), ("hqq", 4), ("rtn", 3), ("rtn", 8))
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data_dir", required=True, help="folder of data sets in hub layout")
parser.add_argument("--tasks", default="arc_easy,arc_challenge,piqa,winogrande")
parser.add_argument("--limit", type=int, default=200, help="items per task (default: %(default)s)")
parser.add_argument("--store", default="forecast-benchmark", help="folder of the runs, in which finished work is found")
asked = parser.parse_args()

alike = {"num_shuffles": 0, "task_args": {"noise_items": 20}, "store": asked.store}
there = {"tasks": asked.tasks, "data_dir": asked.data_dir, "limit": asked.limit, **alike}
[first, *_] = made = [mc.compress("demo", method, bits=bits, store=asked.store) for method, bits in VARIANTS]
print("| variant | task | expected, % | flipped, % | inside |\n|---|---|---|---|---|")
errors, inside = [], []
other = mc.evaluate(first, **there)  # for the baseline's answers: what the first variant answered is not read
for variant in made:
    forecast = mc.forecast(mc.evaluate(variant, limit=60, **alike), other, store=asked.store)
    seen = mc.evaluate(variant, **there)
    flips = {r.task: r.value for r in seen.results if r.name == "distance/flips_pct" and r.category is None}
    for row in forecast.flips:
        held = row.low <= flips[row.task] <= row.high
        shown = f"{row.value:.1f} [{row.low:.1f}, {row.high:.1f}] | {flips[row.task]:.1f}"
        print(f"| {forecast.variant} | {row.task or 'all'} | {shown} | {'yes' if held else 'no'} |", flush=True)
        if row.task is not None:
            errors.append(abs(row.value - flips[row.task]))
            inside.append(held)
off = f"median error {np.median(errors):.2f} points, 90 % within {np.quantile(errors, 0.9):.2f}"
print(f"{len(errors)} forecasts: {off}; inside the interval {100 * np.mean(inside):.0f} %")
