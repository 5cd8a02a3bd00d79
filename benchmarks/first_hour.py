"""What a new user waits for, as multiples of the imports that every such tool needs, in one run on one machine.

    python benchmarks/first_hour.py [--sweep] [--beside] [--repeats 3]

Each job is a command of the README's kind in one new folder: the main job, a second variant, the same again, and with
`--sweep` a sweep of eight variants of the same evaluation. The unit is `import torch, transformers, mlflow`, the median
of three new interpreters; so the multiples can be compared between machines, and the seconds cannot. With `--repeats`
each job is the median of so many new folders.

With `--beside`, an evaluation of the demo (baseline and variant) alone and two at once, each in a folder of its own:
with a process of one thread per core, and as it was before, with as many threads as cores that spin while they wait.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
_MAIN = ["run", str(ROOT), "--env-manager", "local"]
JOBS = {  # job -> program, arguments, the most that it should take
    "main job of the README": ("mlflow", [*_MAIN, "-P", "method=awq", "-P", "bits=4"], 20),
    "a second variant": ("mlflow", [*_MAIN, "-P", "method=rtn", "-P", "bits=4"], 8),
    "the same again": ("mlflow", [*_MAIN, "-P", "method=rtn", "-P", "bits=4"], 2),
}
SWEEP = (
    "mlflow_compress",
    ["sweep", "--methods", "rtn,gptq,awq,hqq", "--bits", "8,4"],
    59,
)  # 0.35 of 8 single runs of 21


def seconds(command: list[str], folder: Path) -> tuple[float, float]:
    """Return the seconds that a command takes, and those of all its processors."""
    environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
    before, began = os.times(), time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    took, after = time.perf_counter() - began, os.times()
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return took, after.children_user + after.children_system - before.children_user - before.children_system


def evaluations(root: Path, checkpoint: Path, n: int, **environment: str) -> float:
    """Return the seconds of so many evaluations of a checkpoint at once, each in a new folder."""
    began, running = time.perf_counter(), []
    for _ in range(n):
        folder = Path(tempfile.mkdtemp(dir=root))
        here = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", **environment}
        command = [sys.executable, "-m", "mlflow_compress", "evaluate", "--checkpoint", str(checkpoint)]
        running.append(subprocess.Popen(command, cwd=folder, env=here, stdout=subprocess.DEVNULL))
    if any(process.wait() for process in running):
        raise SystemExit("an evaluation failed")
    return time.perf_counter() - began


def beside(root: Path, unit: float, repeats: int) -> None:
    """Print how long evaluations take alone and at once, with one thread per core and with threads that spin."""
    compress = [sys.executable, "-m", "mlflow_compress", "quantize", "--method", "rtn", "--bits", "4"]
    seconds([*compress, "--output_dir", str(root / "made")], root)
    [checkpoint] = (root / "made").glob("demo-*")
    spinning = {"OMP_NUM_THREADS": str(os.cpu_count()), "GOMP_SPINCOUNT": "300000"}  # libgomp's own default
    print(f"\n{'evaluations of the demo':32}{'alone':>9}{'multiple':>10}{'two at once':>13}{'ratio to 2 x alone':>20}")
    for name, environment in (("one thread per core", {}), ("threads that spin", spinning)):
        alone = statistics.median(evaluations(root, checkpoint, 1, **environment) for _ in range(repeats))
        two = evaluations(root, checkpoint, 2, **environment)
        print(f"{name:32}{alone:9.1f}{alone / unit:10.1f}{two:13.1f}{two / (2 * alone):20.2f}", flush=True)


def main() -> None:
    """Run the jobs, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="also a sweep of eight variants")
    parser.add_argument("--beside", action="store_true", help="also evaluations beside each other")
    parser.add_argument("--repeats", type=int, default=1, help="new folders, of which the median is shown [1]")
    options = parser.parse_args()
    jobs = {**JOBS, **({"a sweep of eight": SWEEP} if options.sweep else {})}
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(tempfile.mkdtemp(dir=root)) for _ in range(options.repeats)]
        imports = [sys.executable, "-c", "import torch, transformers, mlflow"]
        unit = statistics.median(seconds(imports, Path(root))[0] for _ in range(3))
        print(f"{'job':24}{'seconds':>9}{'of processors':>15}{'multiple':>10}{'at most':>9}")
        print(f"{'the imports':24}{unit:9.1f}{'':15}{1:10.1f}", flush=True)
        for job, (program, arguments, most) in jobs.items():
            runs = [seconds([sys.executable, "-m", program, *arguments], folder) for folder in folders]
            took, processors = map(statistics.median, zip(*runs, strict=True))
            print(f"{job:24}{took:9.1f}{processors:15.1f}{took / unit:10.1f}{most:9}", flush=True)
        if options.beside:
            beside(Path(root), unit, options.repeats)


if __name__ == "__main__":
    main()
