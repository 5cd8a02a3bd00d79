"""Which distances on the baseline's own thoughts predict the right answers that a variant loses?

Variants of two models that think are evaluated on 100 sums: the embedded one, and one of another width, trained from
another seed, whose problems are those of its own seed. Each distance is ranked against the loss of `pass_at_1`:
Spearman's correlation over variants, with the 95 % interval of 2,000 draws of variants with replacement, and the same
of its difference from that of `chain_kl`; of all variants, and of the near ones. The loss is from 8 drawn answers a
problem and has luck in it; the distances have none but that of the thoughts.

    OMP_NUM_THREADS=1 python -m benchmarks.chain_distances_predict --work DIR

A trained model in `DIR/thinks_model` is taken (`tools/train_demo_thinks.py` writes such a folder); otherwise it is
trained first. The values are kept in `DIR/variants.jsonl`, and what is there is not measured again.
"""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata

import mlflow_compress as mc
from mlflow_compress.metrics.stats.arrays import Float
from tools.train_demo_thinks import test_rows, train

SEED, STEPS, WIDTH = 77, 2400, 192  # of the second model
VARIANTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    *(
        ("rtn", {"bits": bits, "group_size": size})
        for bits, size in ((4, 64), (3, 64), (3, 32), (2, 64), (2, 32), (2, 16))
    ),
    *(("hqq", {"bits": 2, "group_size": size}) for size in (64, 32, 16)),
    *(("magnitude", {"method_args": {"sparsity": share}}) for share in (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)),
    *(("gaussian-noise", {"method_args": {"scale": scale}}) for scale in (0.05, 0.1, 0.2, 0.3, 0.4)),
)
NEAR = 0.001  # Mean KL of a thought, in nats, of variants that nobody would refuse at sight
FIRST = "chain_first_parted_token"
WHOLE = (
    *("chain_kl", "chain_kl_forking_ratio", "chain_kl_hesitation_ratio", "chain_parted_pct"),
    *(FIRST, "chain_answer_logprob_delta"),
)
PLACES = (
    *("forking places", "other places of the thought", "hesitation markers", "behind the thought"),
    *("first 100 tokens of the thought", "last 100 tokens of the thought", "tenth 1 of the thought"),
)


def measure(model: str, tasks: str, method: str, options: Mapping[str, Any]) -> dict[str, float]:
    """Return the loss of right answers in points, and every distance: larger is farther."""
    common: dict[str, Any] = {"task_args": {"thinking_max_new_tokens": 256}, "judge": False, "speed": False}
    found = mc.run(model=model, tasks=tasks, method=method, **common, **options)
    pooled = {name.removeprefix("reasoning/"): result.value for name, result in found.pooled.items()}
    # There is no number of the first token where the most probable one differs in fewer than half of the thoughts.
    values = {name: pooled.get(name, np.inf if name == FIRST else np.nan) for name in WHOLE}
    values |= {name: -values[name] for name in (FIRST, "chain_answer_logprob_delta")}
    kl = {one.category: one.value for one in found.results if one.name == "reasoning/chain_kl"}
    values |= {f"chain_kl, {place}": kl.get(place, np.nan) for place in PLACES}
    return {"loss": -100.0 * pooled["pass_at_1_delta"], **values}


def correlation(x: Float, y: Float) -> float:
    """Return Spearman's correlation; NaN where all values of one are equal, or one is missing."""
    a, b = rankdata(x), rankdata(y)
    return float(np.corrcoef(a, b)[0, 1]) if np.ptp(a) > 0 and np.ptp(b) > 0 else np.nan


def correlations(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield each distance, its correlation with the loss, and by how much that is larger than the one of `chain_kl`."""
    loss, rng = np.array([row["loss"] for row in rows]), np.random.default_rng(0)
    draws = rng.integers(len(rows), size=(2000, len(rows)))

    def drawn(name: str) -> Float:
        values = np.array([row[name] for row in rows])
        return np.array([correlation(values[d], loss[d]) for d in [np.arange(len(rows)), *draws]])

    def text(values: Float) -> str:
        if np.isnan(values[0]):
            return "none"
        low, high = np.nanquantile(values[1:], (0.025, 0.975))
        return f"{values[0]:.2f} [{low:.2f}, {high:.2f}]"

    whole = drawn("chain_kl")
    for name in (one for one in rows[0] if one not in ("model", "variant", "loss")):
        yield name, text(drawn(name)), text(drawn(name) - whole)


def main() -> None:
    """Measure what is not there, and print the variants and the correlations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the second model, the store and the values")
    work = parser.parse_args().work.resolve()
    if not (work / "thinks_model" / "config.json").exists():
        torch.set_num_threads(1)
        train(work, SEED, STEPS, WIDTH)
    os.chdir(work)  # of the store
    problems, kept = work / "problems.jsonl", work / "variants.jsonl"
    problems.write_text("".join(json.dumps(row) + "\n" for row in test_rows(SEED)))
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    for name, model, tasks in (
        ("demo-thinks", "demo-thinks", "thinking"),
        (f"width {WIDTH}, seed {SEED}", str(work / "thinks_model"), str(problems)),
    ):
        for method, options in VARIANTS:
            label = {"model": name, "variant": f"{method} {json.dumps(options)}"}
            if not any(label.items() <= row.items() for row in rows):
                rows.append({**label, **measure(model, tasks, method, options)})
                kept.write_text("".join(json.dumps(row) + "\n" for row in rows))
            print(json.dumps(next(row for row in rows if label.items() <= row.items())), flush=True)
        mine = [row for row in rows if row["model"] == name]
        for zone, limit in (("all", np.inf), (f"KL < {NEAR:g}", NEAR)):
            chosen = [row for row in mine if row["chain_kl"] < limit]
            for distance, value, more in correlations(chosen):
                print(f"| {name} | {zone}, {len(chosen)} | {distance} | {value} | {more} |")


if __name__ == "__main__":
    main()
