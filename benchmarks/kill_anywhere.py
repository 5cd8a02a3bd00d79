"""Commands killed at random moments and started again: what they find, and what is left of the first attempt.

Each kill starts from the same store: a command begins, gets SIGKILL, SIGTERM or SIGINT at a random moment between its
start and its usual end (alone, or with the processes it has started), and the same command runs again to its end. Then
must hold, against a run that nobody disturbed: the same metrics and verdicts, the same versions and aliases in the
registry, no run RUNNING, no lock in the way, and as many bytes on disk (the database aside, and 64 KiB for the
parameters of killed runs). The exit code is 1 if one kill breaks one of these.

Example
-------
python benchmarks/kill_anywhere.py --count 10 --seed 0
python benchmarks/kill_anywhere.py --count 100 --keep /tmp/kills
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
QUANTIZE = ("quantize", "--method", "rtn", "--bits", "4")
SWEEP = ("sweep", "--methods", "rtn", "--bits", "8,4", "--limit", "2", "--judge", "false")
ANSWERS = ("--instruction_limit", "1", "--num_samples", "2", "--max_new_tokens", "8", "--judge_max_tokens", "8")
BOUNDS = ("--max_kl", "9", "--max_flips_pct", "100", "--max_accuracy_drop_pct", "100", "--max_kl_outliers_pct", "100")
ALLOWED_BYTES = 64 * 1024
SLOWER = 10  # a restart that takes this many times as long as an undisturbed run waits for a lock
_NOT_COMPARED = ("speed/",)  # times and memory


@dataclass(frozen=True)
class Case:
    """A command that is killed, and the commands before it."""

    name: str
    before: tuple[tuple[str, ...], ...]
    command: tuple[str, ...]


CHECKPOINT = ("--checkpoint", "CHECKPOINT")  # replaced by the folder that `quantize` has written
CASES = (
    Case("quantize", (), QUANTIZE),
    Case("evaluate", (QUANTIZE,), ("evaluate", *CHECKPOINT, "--limit", "2")),
    Case("judge", (QUANTIZE,), ("judge", *CHECKPOINT, *ANSWERS)),
    Case("promote", (SWEEP,), ("promote", *BOUNDS)),
    Case("sweep", (), SWEEP),
)


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


class Store:
    """A folder with a SQLite store, its artifacts, its home and its temporary files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uri = f"sqlite:///{folder / 'mlflow.db'}"

    def start(self, command: tuple[str, ...]) -> subprocess.Popen[str]:
        """Start a command of the package, in a session of its own."""
        (self.folder / "tmp").mkdir(exist_ok=True)
        environment = {**os.environ, "MLFLOW_TRACKING_URI": self.uri, "TMPDIR": str(self.folder / "tmp")}
        environment.pop("MLFLOW_COMPRESS_HOME", None)
        filled = [self.checkpoint() if part == "CHECKPOINT" else part for part in command]
        return subprocess.Popen(
            [sys.executable, "-m", "mlflow_compress", *filled],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def checkpoint(self) -> str:
        """Return the checkpoint that `quantize` has written."""
        [found] = (self.folder / ".mlflow_compress" / "checkpoints").glob("demo-*")
        return str(found)

    def run(self, command: tuple[str, ...], limit: float | None = None) -> float:
        """Run a command to its end, and return its seconds.

        Raises
        ------
        RuntimeError
            It failed, or took longer than `limit` seconds.
        """
        began = time.perf_counter()
        process = self.start(command)
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise RuntimeError(f"{command[0]} has not ended after {limit:.0f} s") from None
        if process.returncode:
            raise RuntimeError(f"{command[0]} ended with {process.returncode}: {said[-2000:]}")
        return time.perf_counter() - began

    def outcome(self) -> Outcome:
        """Return what the store holds now, read by a new process.

        MLflow keeps connections to a database open: in this process they would lead to the file before it was restored.
        """
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as reader:
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


def differences(found: Outcome, undisturbed: Outcome) -> list[str]:
    """Return what a store that was disturbed holds otherwise, in words; empty where all is well."""
    wrong = []
    for name in ("metrics", "versions", "aliases"):
        if getattr(found, name) != getattr(undisturbed, name):
            wrong.append(name)
    # A command that is killed after its end has run twice, and stores its results twice.
    once = found.finished == undisturbed.finished
    if once and found.verdicts != undisturbed.verdicts:
        wrong.append("verdicts")
    if found.running:
        wrong.append(f"{found.running} left RUNNING")
    if once and found.bytes > undisturbed.bytes + ALLOWED_BYTES:
        wrong.append(f"{found.bytes - undisturbed.bytes:,} bytes more on disk")
    return wrong


class Kills:
    """Kills of one command, each from the same store."""

    def __init__(self, case: Case, work: Path) -> None:
        self._case, self._store, self._template = case, Store(work / "store"), work / f"before-{case.name}"
        shutil.rmtree(self._store.folder, ignore_errors=True)
        self._store.folder.mkdir(parents=True)
        for command in case.before:
            self._store.run(command)
        self._keep()
        self.seconds = self._store.run(case.command)
        self.undisturbed = self._store.outcome()

    def _keep(self) -> None:
        shutil.rmtree(self._template, ignore_errors=True)
        shutil.copytree(self._store.folder, self._template, symlinks=True)

    def _restore(self) -> None:
        """Put the store back where it was, at the same paths, which its database names."""
        shutil.rmtree(self._store.folder)
        shutil.copytree(self._template, self._store.folder, symlinks=True)

    def one(self, draw: random.Random) -> dict[str, Any]:
        """Kill once, start again, and return what was done and what is wrong."""
        self._restore()
        number, after = draw.choice(SIGNALS), draw.uniform(0.0, self.seconds)
        whom = draw.choice(("process", "group"))
        process = self._store.start(self._case.command)
        try:
            process.communicate(timeout=after)
        except subprocess.TimeoutExpired:
            if whom == "group":
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            process.communicate()
        row = {"signal": number.name, "whom": whom, "after": after, "ended": process.returncode}
        try:
            self._store.run(self._case.command, limit=max(60.0, SLOWER * self.seconds))
        except RuntimeError as error:
            return {**row, "wrong": [str(error)]}
        return {**row, "wrong": differences(self._store.outcome(), self.undisturbed)}


def main() -> None:
    """Kill, print a line per kill and a table; the exit code is 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="kills, over all commands (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", default=",".join(case.name for case in CASES), help="comma-separated")
    parser.add_argument("--keep", type=Path, help="folder for the stores; none: a temporary one")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    cases = [case for case in CASES if case.name in given.commands.split(",")]
    table: list[str] = []
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for index, case in enumerate(cases):
            kills = Kills(case, given.keep or Path(folder))
            count = given.count // len(cases) + (index < given.count % len(cases))
            print(f"{case.name}: {kills.seconds:.0f} s undisturbed", flush=True)
            wrong = 0
            signals: dict[str, int] = {}
            for _ in range(count):
                row = kills.one(draw)
                wrong += bool(row["wrong"])
                signals[row["signal"]] = signals.get(row["signal"], 0) + 1
                said = "; ".join(row["wrong"]) or "as undisturbed"
                told = f"{row['signal']} to the {row['whom']} after {row['after']:.1f} s, ended {row['ended']}"
                print(f"  {told}: {said}", flush=True)
            bad += wrong
            named = ", ".join(f"{n} {name}" for name, n in sorted(signals.items()))
            table.append(f"| `{case.name}` | {kills.seconds:.0f} | {count} ({named}) | {wrong} |")
    print("\n| command | seconds | kills | wrong |\n|---|---|---|---|")
    print("\n".join(table))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
