"""What a gate that stops early saves, and whether its verdict is that of the whole evaluation.

python benchmarks/gate.py [--store FOLDER] [--orders 200] [--runs 2000]

Compresses the demo model in many ways and evaluates every variant on all items, once (found again in the folder). Then
the items of every variant are looked at in many random orders, in the gate's blocks and with the gate's own tests. The
verdict of the whole evaluation is that of a promotion with the same policy. No figure comes from anywhere else.

A second table repeats the gate where every limit is exactly the truth: any verdict on such a check is an error.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import mlflow_compress as mc
from mlflow_compress.config.policy import Policy
from mlflow_compress.decide.gates import gate_values
from mlflow_compress.decide.item_checks import VALUES, ItemPolicy, item_policy
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.stats.sequential import PASS_SHARE, BoundedCheck, p_values, verdicts
from mlflow_compress.records import RunRecords

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--store", default="gate-benchmark")
parser.add_argument("--orders", type=int, default=200, help="random orders of the items, per variant and policy")
parser.add_argument("--runs", type=int, default=2000, help="simulated gates at the limit")
parser.add_argument("--error", type=float, default=0.05)
parser.add_argument("--block", type=int, default=20)
asked = parser.parse_args()

VARIANTS = (
    ("fp16", "auto"), ("rtn", "8"), ("rtn", "4"), ("rtn", "3"), ("rtn", "2"), ("bnb-nf4", "auto"), ("gptq", "4"),
    ("gptq", "3"), ("awq", "4"), ("awq", "3"), ("wanda", "auto"), ("magnitude", "auto"),
)  # fmt: skip
HELD_OUT = (("bnb-int8", "auto"), ("bnb-fp4", "auto"), ("hqq", "4"), ("w8a8", "auto"), ("sparsegpt", "auto"))
"""Variants that had no part in the choice of the bets (`early.betting`), error shares and block size."""

POLICIES = {
    "default": Policy(),
    "strict": Policy().overridden(max_kl=0.02, max_flips_pct=3, max_accuracy_drop_pct=2),
    "loose": Policy().overridden(max_kl=0.1, max_kl_outliers_pct=3, max_flips_pct=10, max_accuracy_drop_pct=4),
}
Values = dict[str, np.ndarray]


def stop(checks: ItemPolicy, values: Values, order: np.ndarray) -> tuple[str, int]:
    """Return the gate's verdict and the items it has looked at; "undecided" after all of them."""
    claims = [check.claim for check in checks.checks]
    paths = [p_values(c, values[c.name][order], error=asked.error, n_checks=len(claims)) for c in claims]
    level = PASS_SHARE * asked.error
    for end in [*range(asked.block, len(order), asked.block), len(order)]:
        # Where neither every check can pass nor any fail, the rules are not asked: that is most looks.
        if max(w[end - 1] for w, _ in paths) > level and min(r[end - 1] for _, r in paths) > asked.error - level:
            continue
        found = verdicts([w[end - 1] for w, _ in paths], [r[end - 1] for _, r in paths], error=asked.error)
        if "fail" in found:
            return "fail", end
        if all(verdict == "pass" for verdict in found):
            return "pass", end
    return "undecided", len(order)


def item_values(checks: ItemPolicy, inputs: MetricInputs) -> Values:
    """Return the values of every check, on the items that have all of them."""
    rows = {check.claim.name: check.rows(inputs.view, inputs.headline_families) for check in checks.checks}
    found = {c.claim.name: VALUES[c.metric].of(inputs)[rows[c.claim.name]] for c in checks.checks}
    whole = np.isfinite(np.stack(list(found.values()))).all(axis=0)
    return {name: values[whole] for name, values in found.items()}


def quartiles(shares: list[float]) -> str:
    """Return median and quartiles in percent."""
    low, middle, high = (100 * q for q in np.percentile(shares, [25, 50, 75]))
    return f"{middle:.0f} % [{low:.0f}, {high:.0f}]"


HELD_OUT_POLICIES = {
    "default": Policy(),
    "middle": Policy().overridden(max_kl=0.03, max_kl_outliers_pct=2, max_flips_pct=4, max_accuracy_drop_pct=3),
    "wide": Policy().overridden(max_kl=0.2, max_kl_outliers_pct=5, max_flips_pct=15, max_accuracy_drop_pct=5),
}


def real(variants: Sequence[tuple[str, str]], policies: Mapping[str, Policy]) -> None:
    """Print the table of real variants."""
    rng = np.random.default_rng(0)
    print("| policy | variant | whole evaluation | agrees | wrong early | undecided | items used: median [quartiles] |")
    print("|---|---|---|--:|--:|--:|--:|")
    every: list[float] = []
    agreed = early = wrong = 0
    medians = []
    for method, bits in variants:
        variant = mc.compress("demo", method, bits=bits, store=asked.store)
        found = mc.evaluate(variant, num_shuffles=0, task_args={"noise_items": 20}, store=asked.store)
        baseline = RunRecords.read(Path(found.baseline_records_folder))
        inputs = MetricInputs(baseline=baseline, variant=found.records())
        published = gate_values(found.pooled)
        for name, policy in policies.items():
            checks = item_policy(policy)
            whole = all(check.passed for gate in checks.gates for check in gate.checks(published))
            values = item_values(checks, inputs)
            n = len(next(iter(values.values())))
            ends = [stop(checks, values, rng.permutation(n)) for _ in range(asked.orders)]
            same = [verdict in ("undecided", "pass" if whole else "fail") for verdict, _ in ends]
            shares = [used / n for _, used in ends]
            open_ = np.mean([verdict == "undecided" for verdict, _ in ends])
            wrongly, still = f"{100 * (1 - np.mean(same)):.1f} %", f"{100 * open_:.0f} %"
            cells = (name, found.name, "passes" if whole else "fails", f"{100 * np.mean(same):.1f} %", wrongly, still)
            print(f"| {' | '.join(cells)} | {quartiles(shares)} |", flush=True)
            every += shares
            medians.append(float(np.median(shares)))
            agreed += sum(same)
            early += sum(verdict != "undecided" for verdict, _ in ends)
            wrong += len(same) - sum(same)
    what = f"{len(variants)} variants and {len(policies)} policies on {n} items, error {asked.error}"
    print(f"\n{len(every)} gates of {what}")
    print(f"verdict of the whole evaluation: {100 * agreed / len(every):.2f} %; another: {wrong} of {early} early ones")
    print(f"items used over all gates: {quartiles(every)}; median of the medians {100 * np.median(medians):.0f} %")


def at_the_limit() -> None:
    """Print how often a check whose limit is exactly the truth is decided: alone wrong passes, and wrong fails."""
    rng = np.random.default_rng(1)
    n = 1620

    def clipped(size: int) -> np.ndarray:
        return np.minimum(rng.gamma(0.3, 0.05 / 0.3, size=size), 1.0)

    mean = float(clipped(4_000_000).mean())  # clipping lowers it a little below 0.05
    truths = {
        "flips 5 %": (BoundedCheck(name="flips", limit=0.05), lambda: (rng.random(n) < 0.05).astype(float)),
        "share above the clip 1 %": (
            BoundedCheck(name="above", limit=0.01),
            lambda: (rng.random(n) < 0.01).astype(float),
        ),
        f"clipped KL {mean:.4f} nats": (BoundedCheck(name="kl", limit=mean), lambda: clipped(n)),
        "accuracy -2 points, 12 % flips": (
            BoundedCheck(name="accuracy", limit=-0.02, low=-1.0, at_least=True),
            lambda: rng.choice([-1.0, 0.0, 1.0], size=n, p=[0.07, 0.88, 0.05]),
        ),
    }
    checks = [check for check, _ in truths.values()]
    any_pass = any_fail = 0
    by_check = np.zeros((len(checks), 2), dtype=int)
    for _ in range(asked.runs):
        passed, failed = np.zeros(len(checks), dtype=bool), np.zeros(len(checks), dtype=bool)
        paths = [p_values(c, draw(), error=asked.error, n_checks=len(checks)) for c, draw in truths.values()]
        for end in [*range(asked.block, n, asked.block), n]:
            found = verdicts([w[end - 1] for w, _ in paths], [r[end - 1] for _, r in paths], error=asked.error)
            passed |= np.array(found) == "pass"
            failed |= np.array(found) == "fail"
        by_check += np.stack([passed, failed], axis=1)
        any_pass += bool(passed.any())
        any_fail += bool(failed.any())
    print("\n| check at its limit | passed | failed |\n|---|--:|--:|")
    for name, (passes, fails) in zip(truths, by_check, strict=True):
        print(f"| {name} | {100 * passes / asked.runs:.2f} % | {100 * fails / asked.runs:.2f} % |")
    print(f"| any of the four | {100 * any_pass / asked.runs:.2f} % | {100 * any_fail / asked.runs:.2f} % |")


print("The bets were chosen on these variants and policies:\n")
real(VARIANTS, POLICIES)
print("\nThese variants had no part in the choice, nor had two of the policies:\n")
real(HELD_OUT, HELD_OUT_POLICIES)
at_the_limit()
