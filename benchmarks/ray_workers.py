"""Two Ray workers with one thread each against one, on MMLU five-shot: seconds of a pass, and equal records.

The variant is compared with a stored baseline in the same pass. Models are loaded before the time is taken. One process
without Ray scores the same first; all records must be equal to its own. Last, a worker is killed in the middle.

Example
-------
python benchmarks/ray_workers.py --data HUB_FOLDER --work /tmp/benchmark --items 100
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from threading import Timer
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import psutil
from against_harness import SUBJECTS
from one_pass import mmlu
from setting import machine, make_model, make_variant, parser

from mlflow_compress.config import EngineConfig
from mlflow_compress.engines.ray.remote_model import RemoteModel
from mlflow_compress.engines.ray.workers import started_workers
from mlflow_compress.models.loading import LoadConfig, load_model, open_light
from mlflow_compress.records import OptionDistances, OptionScores, Request
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig

Records = tuple[OptionScores, OptionDistances | None]
QUIET = ScoringConfig(progress=False)


def equal(one: Records, other: Records) -> bool:
    """Return whether scores and distances are the same bits."""
    return all(a is not None and b is not None and a.table.equals(b.table) for a, b in zip(one, other, strict=True))


def kill_a_worker() -> None:
    """Kill -9 one of the actors that score."""
    below = psutil.Process().children(recursive=True)
    actors = [process for process in below if " ".join(process.cmdline()).startswith("ray::ClusterWorker")]
    actors[0].kill()


def scored(
    config: LoadConfig, requests: list[Request], store: StateStore, n: int, *, kill_after: float | None = None
) -> tuple[float, Records]:
    """Return the seconds of one pass on `n` workers, and its records."""
    with started_workers(EngineConfig(engine="ray", workers=n), on_gpu=False) as workers:
        scorer = Scorer(RemoteModel.of(open_light(config), workers=workers), QUIET)
        scorer.score(requests[::4], baseline=store)  # every worker loads the model, and compiles its kernel
        timer = Timer(kill_after, kill_a_worker) if kill_after is not None else None
        if timer is not None:
            timer.start()
        began = time.perf_counter()
        records = scorer.score(requests, baseline=store)
        return time.perf_counter() - began, records


def main() -> None:
    """Time both in turn, and print one JSON line."""
    arguments = parser(str(__doc__))
    arguments.add_argument("--items", type=int, default=100, help="per subject (default: %(default)s)")
    given = arguments.parse_args()
    baseline = make_model(given.work / "llama", given.data)
    config = LoadConfig(path=str(make_variant(given.work / "variant", baseline)), device="cpu")
    requests = list(mmlu(given.data, shuffles=0, items=given.items).requests)
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_model(LoadConfig(path=str(baseline), device="cpu"))
        with StateWriter(Path(folder) / "store", loaded) as writer:
            Scorer(loaded, QUIET).score(requests, capture=writer)
        del loaded
        store = StateStore.open(Path(folder) / "store")
        here = Scorer(load_model(config), QUIET)
        alone = here.score(requests, baseline=store)
        seconds: dict[int, list[float]] = {1: [], 2: []}
        same = True
        for _ in range(given.runs):
            for n in seconds:
                took, records = scored(config, requests, store, n)
                seconds[n].append(took)
                same &= equal(alone, records)
        killed_after = statistics.median(seconds[2]) / 2
        with_kill, records = scored(config, requests, store, 2, kill_after=killed_after)
    one, two = (statistics.median(seconds[n]) for n in (1, 2))
    found: dict[str, Any] = {
        "benchmark": "ray_workers",
        "machine": machine(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "items": given.items * len(SUBJECTS),
        "tokens": here.report.n_tokens,
        "seconds_one_worker": [round(s, 2) for s in seconds[1]],
        "seconds_two_workers": [round(s, 2) for s in seconds[2]],
        "ratio": round(one / two, 2),
        "records_equal": same,
        "seconds_with_a_worker_killed": round(with_kill, 2),
        "records_equal_with_a_worker_killed": equal(alone, records),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
