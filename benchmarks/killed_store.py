"""A store in which commands are killed: what it holds afterwards, and how that differs from an undisturbed one."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol

from benchmarks.forked_commands import Forks

LOOK_S = 0.02
ALLOWED_BYTES = 64 * 1024  # the parameters of killed runs
# Times and memory, and what a second run has not to do again: variants that are there, replies that are paid.
_NOT_COMPARED = ("speed/", "sweep/found", "judge/calls")
_READERS = get_context("forkserver")
_READERS.set_forkserver_preload(["mlflow.tracking"])


@dataclass(frozen=True)
class Outcome:
    """What a store holds."""

    metrics: Mapping[str, Mapping[str, float]]
    verdicts: Mapping[str, str]
    versions: tuple[tuple[str, str], ...]
    aliases: tuple[tuple[str, str], ...]
    running: int
    finished: int
    bytes: int


class Process(Protocol):
    """A command that was started."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""


def ended(process: Process, seconds: float) -> bool:
    """Return whether a command has ended, after waiting for that at most so long."""
    until = time.perf_counter() + seconds
    while process.poll() is None:
        if time.perf_counter() > until:
            return False
        time.sleep(LOOK_S)
    return True


def left_processes(process: Process, seconds: float = 10.0) -> bool:
    """Return whether something that an ended command has started still runs, `seconds` later. It is killed then."""
    until = time.perf_counter() + seconds
    try:
        while time.perf_counter() < until:
            os.killpg(process.pid, 0)
            time.sleep(LOOK_S)
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


class Store:
    """A folder with a SQLite store, its artifacts, its home and its temporary files.

    Commands get `environment` besides this process's; without `forks` each is a new Python process.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], forks: Forks | None = None) -> None:
        self.folder, self.log, self._forks = folder, folder.with_suffix(".log"), forks
        self.uri = f"sqlite:///{folder / 'mlflow.db'}"
        self._environment = environment

    def start(self, command: tuple[str, ...]) -> Process:
        """Start a command of the package, in a session of its own. What it says goes to `log`."""
        (self.folder / "tmp").mkdir(exist_ok=True)
        places = {"MLFLOW_TRACKING_URI": self.uri, "TMPDIR": str(self.folder / "tmp")}
        environment = {**os.environ, **self._environment, **places}
        environment.pop("MLFLOW_COMPRESS_HOME", None)
        filled = [self.checkpoint() if part == "CHECKPOINT" else part for part in command]
        if self._forks is not None:
            return self._forks.start(filled, self.folder, environment, self.log)
        with self.log.open("w") as sink:
            return subprocess.Popen(
                [sys.executable, "-m", "mlflow_compress", *filled],
                cwd=self.folder,
                env=environment,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def checkpoint(self) -> str:
        """Return the checkpoint that `quantize` has written."""
        [found] = (self.folder / ".mlflow_compress" / "checkpoints").glob("demo-*")
        return str(found)

    def run(self, command: tuple[str, ...], limit: float = 1800.0) -> float:
        """Run a command to its end, and return its seconds."""
        began = time.perf_counter()
        process = self.start(command)
        if not ended(process, limit):
            os.killpg(process.pid, signal.SIGKILL)
            raise RuntimeError(f"{command[0]} has not ended after {limit:.0f} s")
        if process.returncode:
            raise RuntimeError(f"{command[0]} ended with {process.returncode}: {self.log.read_text()[-2000:]}")
        return time.perf_counter() - began

    def files(self) -> dict[str, tuple[int, int]]:
        """Return size and time of every file: they differ after a write."""
        found = {}
        for path in self.folder.rglob("*"):
            try:
                seen = path.lstat()
            except FileNotFoundError:  # deleted just now
                continue
            if not path.is_dir():
                found[str(path)] = (seen.st_size, seen.st_mtime_ns)
        return found

    def open_runs(self) -> int:
        """Return the number of runs that are RUNNING now, as the database says."""
        if not (self.folder / "mlflow.db").exists():
            return 0
        with closing(sqlite3.connect(self.folder / "mlflow.db", timeout=20)) as database:
            return int(database.execute("SELECT count(*) FROM runs WHERE status = 'RUNNING'").fetchone()[0])

    def outcome(self) -> Outcome:
        """Return what the store holds now, read by a new process.

        MLflow keeps connections to a database open: in this process they would lead to the file before it was restored.
        """
        with ProcessPoolExecutor(1, mp_context=_READERS) as reader:
            return reader.submit(read_outcome, self.uri, self.folder).result()


def read_outcome(uri: str, folder: Path) -> Outcome:
    """Return what a store holds: of each kind of run and variant, the newest finished one."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    runs = client.search_runs([found.experiment_id for found in client.search_experiments()], max_results=5000)
    metrics: dict[str, Mapping[str, float]] = {}
    verdicts: dict[str, str] = {}
    finished = [run for run in runs if run.info.status == "FINISHED"]
    for run in sorted(finished, key=lambda run: run.info.end_time):
        name = f"{run.data.tags['stage']} {run.data.tags.get('variant', '')}".strip()
        metrics[name] = {k: v for k, v in run.data.metrics.items() if not k.startswith(_NOT_COMPARED)}
        # A promotion that is killed after the alias has moved finds, the second time, that nothing is to be moved.
        verdicts[name] = "" if name == "promote" else run.data.tags.get("verdict", "")
    versions = sorted((v.name, str(v.version)) for v in client.search_model_versions())
    aliases = sorted(
        (f"{model.name}@{alias}", str(version))
        for model in client.search_registered_models()
        for alias, version in model.aliases.items()
    )
    size = sum(
        path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.name.startswith("mlflow.db")
    )
    running = sum(run.info.status == "RUNNING" for run in runs)
    return Outcome(metrics, verdicts, tuple(versions), tuple(aliases), running, len(finished), size)


def differences(found: Outcome, undisturbed: Outcome) -> dict[str, str]:
    """Return what a store that was disturbed holds otherwise, by kind, in words; empty where all is well."""
    wrong = {}
    if found.metrics != undisturbed.metrics:
        wrong["metrics"] = f"other metrics: {_differing(found.metrics, undisturbed.metrics)}"
    # A command that is killed after its end has run twice, and stores its results twice.
    once = found.finished == undisturbed.finished
    if once and found.verdicts != undisturbed.verdicts:
        wrong["metrics"] = "other verdicts"
    if found.versions != undisturbed.versions:
        wrong["registry"] = f"versions {found.versions}"
    if found.aliases != undisturbed.aliases:
        wrong["registry"] = f"aliases {found.aliases}"
    if found.running:
        wrong["RUNNING"] = f"{found.running} left RUNNING"
    if once and found.bytes > undisturbed.bytes + ALLOWED_BYTES:
        wrong["disk"] = f"{found.bytes - undisturbed.bytes:,} bytes more on disk"
    return wrong


def _differing(found: Mapping[str, Mapping[str, float]], undisturbed: Mapping[str, Mapping[str, float]]) -> str:
    """Return the first three metrics that differ, each with what was found and what was due."""
    pairs = [
        f"{run} {name} {found.get(run, {}).get(name)} for {undisturbed.get(run, {}).get(name)}"
        for run in sorted(found.keys() | undisturbed.keys())
        for name in sorted(found.get(run, {}).keys() | undisturbed.get(run, {}).keys())
        if found.get(run, {}).get(name) != undisturbed.get(run, {}).get(name)
    ]
    return ", ".join(pairs[:3]) or "a run is missing"
