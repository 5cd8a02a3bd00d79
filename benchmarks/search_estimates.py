"""How well a cheap estimate says what a format costs: beside measured KL, for every group and format of the demo.

python benchmarks/search_estimates.py
python benchmarks/search_estimates.py --formats gptq:3,gptq:4,gptq:8 --windows 32

All swaps are measured. Then the estimate chooses formats within four budgets, and only what it has chosen is measured;
what these choices cost is compared with those of all measurements.
"""

import argparse
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from search import halves

import mlflow_compress as mc
from mlflow_compress import demo
from mlflow_compress.commands.search.measured_costs import SwapCosts, estimates, format_groups, read_search_text
from mlflow_compress.commands.search.parameters import SearchConfig
from mlflow_compress.decide.cost_table import CostTable, Limit, StoredSizes, estimated_table, rank_correlation
from mlflow_compress.models.source_model import resolve
from mlflow_compress.models.stored_weights import bytes_of_layers, read_headers

BUDGETS = (3.25, 3.5, 4.0, 4.5)


def main() -> None:
    """Measure and estimate, and print two tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="gptq:3,gptq:4,gptq:8")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument(
        "--store", help="tracking store that holds the checkpoints: that of search.py saves their making"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        store = given.store or str(folder / "store")
        texts = halves(folder)
        config = SearchConfig(
            formats=given.formats, search_windows=given.windows, search_text=texts["search_text"], device="cpu"
        )
        formats = given.formats.split(",")
        folders: dict[str, str | None] = {}
        for name in formats:
            method, bits = name.split(":")
            folders[name] = str(mc.compress("demo", method, bits=bits, store=store).folder)
        source = resolve(str(demo.MODEL_DIR))
        groups = format_groups(config, source, [str(one) for one in folders.values()], rescaled=False)
        costs = SwapCosts(config=config, text=read_search_text(config, source, 0), resume=folder, groups=groups)
        began = time.process_time()
        added = np.stack([costs.alone(str(one)) for one in folders.values()], axis=1)
        swap_seconds = time.process_time() - began
        headers = [read_headers(Path(str(one))) for one in folders.values()]
        sizes = StoredSizes(
            groups=tuple(group.name for group in groups),
            formats=tuple(formats),
            layers=np.array([[bytes_of_layers(one, group.modules) for one in headers] for group in groups]),
            base=bytes_of_layers(read_headers(source.folder), source.linear),
            rest=0,
            weights=sum(rows * columns for rows, columns in source.linear.values()),
        )
        report(SimpleNamespace(costs=costs, folders=folders, added=added, sizes=sizes, seconds=swap_seconds))


def report(found: SimpleNamespace) -> None:
    """Print what the estimate is worth."""
    sizes, added = found.sizes, found.added
    measured = added.mean(axis=2)
    full = CostTable(sizes=sizes, start=np.zeros(added.shape[2]), added=added)
    limits = [Limit(kind="bits_per_weight", value=bits) for bits in BUDGETS]
    best = [full.predicted(full.solved(limit).choice) for limit in limits]
    formats = " | ".join(f"within {name}" for name in sizes.formats)
    print(f"| estimate | processor time | rank correlation, all | {formats} | swaps | cost of its choices |")
    print(f"|---|---|---|{'---|' * len(sizes.formats)}---|---|")
    print(f"| none | {found.seconds:.1f} s | 1 | {'1 | ' * len(sizes.formats)}{measured.size} | 1 |")
    began = time.process_time()
    guessed = estimates(found.costs, found.folders)
    seconds = time.process_time() - began
    table, chosen = estimated_table(
        guessed, limits, sizes, lambda column, groups: added[list(groups), column], n_windows=added.shape[2]
    )
    mine = [full.predicted(table.solved(limit).choice) for limit in limits]
    ratios = ", ".join(f"{a / b:.3f}" for a, b in zip(mine, best, strict=True))
    inside = " | ".join(f"{rank_correlation(guessed[:, j], measured[:, j]):.2f}" for j in range(guessed.shape[1]))
    overall = f"{rank_correlation(guessed.ravel(), measured.ravel()):.3f}"
    print(f"| fisher | {seconds:.1f} s | {overall} | {inside} | {chosen.measured.sum()} | {ratios} |")
    factors = np.exp(np.log(guessed / measured).mean(axis=0))
    print(f"<!-- fisher over measured, geometric mean by format: {np.round(factors, 2).tolist()} -->")


if __name__ == "__main__":
    main()
