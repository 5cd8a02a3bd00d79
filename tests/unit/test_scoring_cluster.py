"""Workers of a Ray cluster give the records of one process, bit for bit, whoever of them is lost on the way."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from mlflow_compress.records import Generations, RunRecords
from mlflow_compress.scoring.baseline_store import StateStore
from tests.unit.cluster_scoring import ADDRESS
from tests.waiting import until

ROOT = Path(__file__).parents[2]
KINDS = ("option_scores", "option_distances", "token_scores", "token_distances")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray (pip install -e '.[ray]')"),
]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "ab" * 32,
    "RAY_USAGE_STATS_ENABLED": "0",
}


def start(mode: str, folder: Path, **more: str) -> subprocess.Popen[str]:
    """Start `cluster_scoring` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.unit.cluster_scoring", mode, str(folder)],
        cwd=ROOT,
        env={**ENVIRONMENT, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a process that must succeed, and return its output."""
    output, _ = process.communicate()
    assert process.returncode == 0, output[-5000:]
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, and what one process found."""
    folder = tmp_path_factory.mktemp("cluster")
    finish(start("one", folder))
    return folder


@pytest.fixture(scope="module")
def two(folder: Path) -> Path:
    """What two workers found."""
    finish(start("two", folder))
    return folder


def assert_same(one: Path, other: Path) -> None:
    """All records of two folders are there and equal."""
    for part in ("base", "variant"):
        first, second = RunRecords.read(one / part), RunRecords.read(other / part)
        there = [kind for kind in KINDS if getattr(first, kind) is not None]
        assert len(there) == {"base": 2, "variant": 4}[part]
        assert there == [kind for kind in KINDS if getattr(second, kind) is not None]
        for kind in there:
            assert getattr(first, kind).table.equals(getattr(second, kind).table), (part, kind)
    assert Generations.read(one / "answers").table.equals(Generations.read(other / "answers").table)


@pytest.mark.ci
def test_two_workers_give_the_records_of_one_process(two: Path) -> None:
    assert_same(two / "one", two / "two")


@pytest.mark.ci
def test_a_store_that_workers_filled_is_that_of_one_process(two: Path) -> None:
    ours, theirs = (StateStore.open(two / run / "store") for run in ("one", "two"))
    differ = {name for name, value in vars(ours.manifest).items() if vars(theirs.manifest)[name] != value}
    assert differ == {"shards"}  # rows are divided among files elsewhere
    every = np.arange(ours.n_rows)
    assert ours.n_rows == theirs.n_rows
    assert torch.equal(ours.states(every), theirs.states(every))
    assert len(list((two / "two" / "store").glob("states-*"))) == len(theirs.manifest.shards)


@pytest.mark.ci
def test_what_goes_wrong_on_a_worker_is_one_clear_error(two: Path) -> None:
    found = json.loads((two / "errors.json").read_text())
    assert found["missing"].startswith("WorkerError: A worker failed: No such model folder.")
    assert str(two / "nowhere") in found["missing"]
    assert found["weights"].startswith("WorkerError: A worker failed: The checkpoint has other weights")
    assert "\n" not in "".join(found.values())


@pytest.mark.ci
def test_workers_that_are_killed_change_nothing(folder: Path) -> None:
    marks = folder / "marks"
    marks.mkdir()
    finish(start("dying", folder, MARKS=str(marks)))
    assert {mark.name for mark in marks.iterdir()} == {"base", "variant", "answers"}
    assert_same(folder / "one", folder / "dying")


@pytest.mark.ci
def test_workers_score_a_model_that_does_not_fit_layer_by_layer(folder: Path) -> None:
    reads = folder / "reads"
    said = finish(start("layers", folder, READS=str(reads)))
    assert_same(folder / "one", folder / "layers")
    assert set(reads.read_text().split()) == {"1"}, "a shard is one sweep"
    n_said = [int(n) for n in re.findall(r"Layer by layer on 2 workers: (\d+) x", said)]
    assert sum(n_said) == len(reads.read_text().split()) and max(n_said) > 2


def parts(unfinished: Path) -> dict[Path, bytes]:
    """The finished shards of a run, by file."""
    return {path: path.read_bytes() for path in unfinished.rglob("part-*.json")}


def test_a_command_that_is_killed_goes_on_with_what_it_kept(folder: Path) -> None:
    unfinished = folder / "unfinished-killed"
    process = start("killed", folder)
    until(lambda: len(parts(unfinished)) >= 4, process)
    process.kill()
    process.wait()
    kept = parts(unfinished)
    assert not (folder / "killed" / "variant").exists()
    (folder / "go-on-killed").touch()
    finish(start("killed", folder))
    assert all(path.read_bytes() == data for path, data in kept.items())
    assert_same(folder / "one", folder / "killed")


@pytest.mark.parametrize("model", ["base", "variant"])
def test_one_process_goes_on_where_workers_stopped(two: Path, model: str) -> None:
    shutil.rmtree(two / "unfinished-goes-on", ignore_errors=True)
    unfinished = shutil.copytree(two / "unfinished-two", two / "unfinished-goes-on")
    names = ("options/part-00001", "corpus/part-00002", "corpus/part-00005", "corpus/part-00006")
    lost = [path for name in names for path in (unfinished / model).glob(f"{name}.*")]
    assert len(lost) == 2 * len(names)  # parts are read up to the first that is missing
    for path in lost:
        path.unlink()
    if model == "base":
        shutil.rmtree(unfinished / "variant")  # which would be about another store
    out = shutil.copytree(two / "two", two / "one_goes_on", dirs_exist_ok=True)
    (out / "store" / "manifest.json").unlink()
    finish(start("one_goes_on", two))
    assert_same(two / "one", out)


def test_a_machine_that_is_lost_costs_its_shards_only(folder: Path) -> None:
    finish(start("node", folder))
    assert_same(folder / "one", folder / "node")


def ray(*arguments: str) -> str:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "ray"), *arguments], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start_head(port: int, scratch: Path) -> None:
    options = ["--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={scratch}"]
    ray("start", "--head", f"--port={port}", *options)


def kill_cluster(port: int, scratch: Path) -> None:
    """Kill -9 every process of the cluster, as when its machine goes down."""
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(scratch) in line and process.pid != os.getpid():
            process.send_signal(signal.SIGKILL)


def test_a_head_that_is_restarted_at_once_is_one_error_and_the_same_command_goes_on(folder: Path) -> None:
    port, scratch = 26_379, Path("/tmp") / f"mc-head-{os.getpid()}"
    unfinished = folder / "unfinished-head"
    try:
        start_head(port, scratch)
        process = start("head", folder, **{ADDRESS: f"127.0.0.1:{port}"})
        until(lambda: len(parts(unfinished)) >= 4, process)
        kill_cluster(port, scratch)
        start_head(port, scratch)  # a new cluster takes the port: Ray itself would wait for its old workers there
        said, _ = process.communicate()
        assert process.returncode == 1
        assert said.splitlines()[-1].startswith(
            "mlflow_compress.errors.WorkerError: Ray's process on this machine does"
        )
        kept = parts(unfinished)
        assert not (folder / "head" / "variant").exists()
        (folder / "go-on-head").touch()
        finish(start("head", folder, **{ADDRESS: f"127.0.0.1:{port}"}))
        assert all(path.read_bytes() == data for path, data in kept.items())
        assert_same(folder / "one", folder / "head")
    finally:
        kill_cluster(port, scratch)
        shutil.rmtree(scratch, ignore_errors=True)
