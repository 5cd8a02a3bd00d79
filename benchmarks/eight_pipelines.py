"""Eight pipelines that start together on one new store: how many finish, and how often the baseline is evaluated.

The store is a SQLite file that does not exist yet, a PostgreSQL behind `mlflow server` with artifacts through the
server, or that PostgreSQL itself. With `--machines N` the pipelines have N homes (folders of unfinished work, locks and
downloads), as those of N machines do: only the store can then tell one that another one evaluates the baseline.

Example
-------
python benchmarks/eight_pipelines.py
python benchmarks/eight_pipelines.py --store server --machines 2
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from local_servers import TrackingServer, postgres

GRID = [(bits, group) for bits in (8, 4) for group in (32, 64, 128, 256)]


@contextmanager
def new_store(kind: str, folder: Path) -> Iterator[str]:
    """Give the URI of a store that holds nothing."""
    with ExitStack() as stack:
        if kind == "sqlite":
            yield f"sqlite:///{folder / 'mlflow.db'}"
            return
        database = stack.enter_context(postgres())
        if kind == "postgresql":
            yield database
        else:
            yield stack.enter_context(TrackingServer(folder, database, workers=2)).uri


def run_together(uri: str, folder: Path, pipelines: int, machines: int) -> tuple[list[int], float]:
    """Run the pipelines, and return their exit codes and the seconds until the last one ended."""
    processes, logs = [], []
    began = time.perf_counter()
    for number in range(pipelines):
        bits, group = GRID[number % len(GRID)]
        environment = {**os.environ, "MLFLOW_TRACKING_URI": uri}
        if machines > 1 or not uri.startswith("sqlite"):
            environment["MLFLOW_COMPRESS_HOME"] = str(folder / f"machine-{number % machines}")
        logs.append((folder / f"pipeline-{number}.log").open("w"))
        command = [sys.executable, "-m", "mlflow_compress", "main", "--method", "rtn", "--bits", str(bits)]
        command += ["--group_size", str(group), "--limit", "2", "--judge", "false"]
        processes.append(
            subprocess.Popen(command, cwd=folder, env=environment, stdout=logs[-1], stderr=subprocess.STDOUT)
        )
    codes = [process.wait() for process in processes]
    for log in logs:
        log.close()
    return codes, time.perf_counter() - began


def main() -> None:
    """Start the pipelines and print what became of them; the exit code is 1 unless all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=["sqlite", "postgresql", "server"], default="sqlite")
    parser.add_argument("--pipelines", type=int, default=8)
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for stores and logs; none: a temporary one")
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        uri = stack.enter_context(new_store(given.store, folder))
        codes, seconds = run_together(uri, folder, given.pipelines, given.machines)
        for number, code in enumerate(codes):
            if code:
                print(f"pipeline {number} ended with {code}:", (folder / f"pipeline-{number}.log").read_text()[-2000:])
        os.environ["MLFLOW_TRACKING_URI"] = uri

        from mlflow.tracking import MlflowClient

        client = MlflowClient(uri)
        experiments = [found.experiment_id for found in client.search_experiments()]
        runs = client.search_runs(experiments, max_results=5000)
        counted = Counter((run.data.tags.get("stage", "none"), run.info.status) for run in runs)
        finished = sum(code == 0 for code in codes)
        baselines = sum(n for (stage, _), n in counted.items() if stage == "baseline")
        running = sum(n for (_, status), n in counted.items() if status == "RUNNING")
        print(f"{given.store}, {given.pipelines} pipelines, {given.machines} machine(s), {os.cpu_count()} cores:")
        print(f"{finished} finished, {baselines} baseline(s), {running} left RUNNING, {seconds:.0f} s")
    sys.exit(0 if finished == given.pipelines and baselines == 1 and running == 0 else 1)


if __name__ == "__main__":
    main()
