"""What handing out 1,000 shards costs: workers that sleep in place of computing, against the seconds that they sleep.

Each task carries as much as a shard of MMLU does: 300 kB of tokens and baseline states to the worker, 100 kB back.

Example
-------
python benchmarks/ray_scheduling.py --shards 1000 --workers 16 --seconds 0.5
"""

import argparse
import json
import os
import time

import numpy as np
import numpy.typing as npt
from setting import machine

from mlflow_compress.config import EngineConfig
from mlflow_compress.engines.ray.workers import WorkerCall, Workers, connected

SENT, RETURNED = 300_000, 100_000  # bytes


class SleepingWorker:
    """Answers as a worker does, and computes nothing."""

    def describe(self) -> dict[str, str]:
        """Return what all have in common."""
        return {}

    def sleep(self, seconds: float, payload: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Sleep, and return some bytes."""
        time.sleep(seconds)
        return payload[:RETURNED].copy()


def main() -> None:
    """Run all tasks, and print one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--shards", type=int, default=1000)
    arguments.add_argument("--workers", type=int, default=16)
    arguments.add_argument("--seconds", type=float, default=0.5, help="of a shard (default: %(default)s)")
    given = arguments.parse_args()
    done = 0

    def count(number: int, result: npt.NDArray[np.uint8]) -> None:
        nonlocal done
        done += len(result) == RETURNED

    with connected(EngineConfig()) as ray:
        actor = ray.remote(SleepingWorker).options(num_cpus=0)
        workers = Workers(ray, given.workers, actor.remote)
        workers.run(8 * given.workers, lambda _: WorkerCall("sleep", (0.5, np.zeros(SENT, np.uint8))), count)
        done = 0
        began = time.perf_counter()
        workers.run(given.shards, lambda _: WorkerCall("sleep", (given.seconds, np.zeros(SENT, np.uint8))), count)
        took = time.perf_counter() - began
    assert done == given.shards
    # With 1,000 shards on 16 workers, some work on 63 and the others wait: that is no cost of handing out.
    ideal = -(-given.shards // given.workers) * given.seconds
    found = {
        "benchmark": "ray_scheduling",
        "machine": machine(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "shards": given.shards,
        "workers": given.workers,
        "seconds_of_a_shard": given.seconds,
        "seconds": round(took, 2),
        "seconds_ideal": round(ideal, 2),
        "overhead_pct": round(100 * (took / ideal - 1), 2),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
