"""Eight variants of the demo in the three runtimes that they are meant for, each timed in turn with its baseline.

It makes the checkpoints, and runs the stage `speed` on each. For a runtime that is not here the reason is printed.

Example
-------
python benchmarks/speed.py --vllm-python vllm-env/bin/python
"""

import argparse
import os
import tempfile
from pathlib import Path

import mlflow_compress as mc

VARIANTS: list[tuple[str, dict[str, str]]] = [
    ("fp16", {}),
    ("layer-drop", {"method_args": "layers=1"}),
    ("wanda", {"method_args": "sparsity=0.5"}),
    ("gptq", {"bits": "4"}),
    ("awq", {"bits": "4"}),
    ("w8a8", {}),
    ("gguf", {"bits": "8"}),
    ("gguf", {"bits": "4"}),
]
HEAD = (
    "| variant | runtime | decode, 1 | decode, 8 | prefill, 1 | prefill, 8 | first token | load | peak memory |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def row(measured: mc.SpeedMeasurement) -> str:
    """Return a line of the table: ratios with intervals, then the variant's own figures with the baseline's."""

    def ratio(what: str, batch: int) -> str:
        found = measured[f"speed/{what}_ratio_batch_{batch}"]
        return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"

    def both(name: str, unit: str) -> str:
        return f"{measured[name].value:.3g} ({measured[f'{name}_baseline'].value:.3g}) {unit}"

    cells = [measured.name, measured.described["runtime"]]
    cells += [ratio(what, batch) for what in ("decode", "prefill") for batch in (1, 8)]
    loaded = (measured.values[f"speed/load_seconds{suffix}"] for suffix in ("", "_baseline"))
    cells += [
        both("speed/first_token_ms", "ms"),
        "{:.3g} ({:.3g}) s".format(*loaded),
        both("speed/memory_peak_mb", "MB"),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM (default: the environment variable)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each (default: %(default)s)")
    parser.add_argument("--threads", default="auto", help="threads of each runtime (default: one per core)")
    given = parser.parse_args()
    print(f"load average {[round(load, 1) for load in os.getloadavg()]}\n\n{HEAD}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for method, settings in VARIANTS:
            checkpoint = mc.compress("demo", method, store=Path(folder), **settings)
            measured = mc.speed(
                checkpoint,
                engine_args={"vllm_python": given.vllm_python},
                speed_args={"repeats": given.repeats, "threads": given.threads},
                store=Path(folder),
            )
            print(row(measured) if measured.results else f"| {measured.summary} |", flush=True)


if __name__ == "__main__":
    main()
