"""A sweep beside single runs of its variants: seconds of both, and their ratio.

Each side has a store of its own, and so makes baseline, checkpoints and answers itself. The single runs are commands of
their own, one after the other. The sides take turns if `--repeats` is more than 1. The aim is a ratio of at most 0.6
for the eight variants on two cores; take it on a machine with nothing else to do.

Example
-------
python benchmarks/sweep.py
python benchmarks/sweep.py --variants rtn:8,rtn:4 --options limit=2,judge=false
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

EIGHT = "rtn:8,rtn:4,rtn:3,gptq:4,gptq:3,awq:4,hqq:4,bnb-nf4:4"


def run(folder: Path, *arguments: str) -> float:
    """Run one command of the package in a folder with its own store, and return its seconds."""
    environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}"}
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "mlflow_compress", *arguments],
        cwd=folder,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - began


def main() -> None:
    """Measure both sides and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default=EIGHT, help="METHOD:BITS, comma-separated")
    parser.add_argument("--options", default="", help="parameters of both sides: name=value,name=value")
    parser.add_argument("--repeats", type=int, default=1)
    given = parser.parse_args()
    variants = [tuple(part.split(":")) for part in given.variants.split(",")]
    options = [f"--{part}" for part in given.options.split(",") if part]
    grid = yaml.safe_dump([{"method": method, "bits": int(bits)} for method, bits in variants])
    singles, sweeps = [], []
    for _ in range(given.repeats):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            each = [run(Path(one), "main", "--method", m, "--bits", b, *options) for m, b in variants]
            singles.append(sum(each))
            print("single runs:", ", ".join(f"{m} {b}: {s:.0f} s" for (m, b), s in zip(variants, each, strict=True)))
            (Path(other) / "grid.yaml").write_text(grid)
            sweeps.append(run(Path(other), "sweep", "--grid", "grid.yaml", *options))
            print(f"single runs {singles[-1]:.0f} s, sweep {sweeps[-1]:.0f} s", flush=True)
    single, sweep = statistics.median(singles), statistics.median(sweeps)
    counted = f"{len(variants)} variants, {os.cpu_count()} cores"
    print(f"{counted}: {single:.0f} s and {sweep:.0f} s, ratio {sweep / single:.2f}")


if __name__ == "__main__":
    main()
