"""Several processes give the records of one, bit for bit, and end together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from mlflow_compress.records import RunRecords
from mlflow_compress.scoring.baseline_store.state_store import StateStore
from tests.unit.scoring_together import DONE, prepare

ROOT = Path(__file__).parents[2]
KINDS = ("option_scores", "option_distances", "token_scores", "token_distances")


@contextmanager
def launched(mode: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start two processes with torchrun, and end what is left of them, which is nothing where the test passes."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", *launcher, "-m", "tests.unit.scoring_together", mode, str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        for left in still_running(folder):
            left.kill()


def still_running(folder: Path) -> list[psutil.Process]:
    """The processes, besides this one, that name the folder in their command."""
    return [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Where one process and two have left their records, and what two found."""
    folder = tmp_path_factory.mktemp("team")
    with launched("together", folder) as process:
        output, _ = process.communicate(timeout=1800)
        assert f"exitcode  : {DONE}" in output, output[-5000:]
        assert process.returncode != 0
        assert still_running(folder) == []
    return folder, json.loads((folder / "found.json").read_text())


def assert_same(one: Path, other: Path) -> None:
    """All records of two folders are there and equal."""
    first, second = RunRecords.read(one), RunRecords.read(other)
    there = [kind for kind in KINDS if getattr(first, kind) is not None]
    assert len(there) >= 2 and there == [kind for kind in KINDS if getattr(second, kind) is not None]
    for kind in there:
        assert getattr(first, kind).table.equals(getattr(second, kind).table), kind


@pytest.mark.parametrize("part", ["base", "stored", "resident"])
def test_two_processes_give_the_records_of_one(world: tuple[Path, Any], part: str) -> None:
    assert_same(world[0] / "one" / part, world[0] / "two" / part)


def test_both_processes_had_a_share(world: tuple[Path, Any]) -> None:
    assert world[1]["processes"] == [2] * 6


def test_a_store_of_two_processes_is_that_of_one(world: tuple[Path, Any]) -> None:
    one, two = (StateStore.open(world[0] / run / "store") for run in ("one", "two"))
    assert one.manifest.passes == two.manifest.passes
    assert one.manifest.head == two.manifest.head
    files = [str(shard["file"]) for shard in two.manifest.shards]
    assert len(set(files)) == len(files)
    for number in ("1-1", "2-1"):  # pass and share
        assert any(name.startswith(f"states-{number}-") for name in files)
    every = np.arange(one.n_rows)
    assert one.n_rows == two.n_rows
    assert torch.equal(one.states(every), two.states(every))


@pytest.mark.parametrize("run", ["one_of_two", "two_of_one"])
def test_the_baseline_has_not_moved_from_a_store_that_another_number_of_processes_wrote(
    world: tuple[Path, Any], run: str
) -> None:
    itself, variant = RunRecords.read(world[0] / run), RunRecords.read(world[0] / "one" / "stored")
    assert itself.option_distances is not None and itself.token_distances is not None
    kl = itself.option_distances.table.column("kl").drop_null().to_numpy()
    assert len(kl) > 80 and (kl == 0).all()
    assert (itself.token_distances.column("kl") == 0).all()
    assert variant.token_distances is not None and (variant.token_distances.column("kl") > 0).all()


def test_what_is_not_shared_out_says_why(world: tuple[Path, Any]) -> None:
    memory, little = world[1]["alone"]
    assert memory == [1, "other processes cannot open a model that exists only in memory"]
    assert little == [1, "the plan has only one group"]


def test_another_number_of_processes_is_refused(world: tuple[Path, Any]) -> None:
    text = world[1]["StoreError"]
    assert "an interrupted pass with other processes." in text and "Resume with the same settings" in text


def test_the_leaders_own_error_stays_what_it_is(world: tuple[Path, Any]) -> None:
    assert world[1]["DataError"] == "The leader failed in its own share."


def test_the_error_of_another_process_is_one_clear_error_and_the_team_goes_on(world: tuple[Path, Any]) -> None:
    text = world[1]["WorkerError"]
    assert text.startswith("Process 2 of 2 failed: Not a model folder.") and str(world[0] / "broken") in text
    assert_same(world[0] / "one" / "base", world[0] / "after" / "base")


def killable(folder: Path) -> list[psutil.Process]:
    """The scoring processes of a launched job, the leader first."""
    found = [p for p in still_running(folder) if "torch.distributed.run" not in " ".join(p.cmdline())]
    return sorted(found, key=lambda p: p.environ().get("RANK", ""))


def wait_for_parts(folder: Path, n: int) -> None:
    """Wait until both shares of some pass have written so many parts."""
    for _ in range(6000):
        for share in (folder / "unfinished").glob("*/*/share-1"):
            if min(len(list(f.glob("part-*.json"))) for f in (share, share.parent)) >= n:
                return
        time.sleep(0.01)
    raise AssertionError("the journals were not written")


@pytest.mark.slow
@pytest.mark.ci
def test_a_job_killed_whole_ends_with_the_same_bytes(world: tuple[Path, Any]) -> None:
    folder = world[0]
    with launched("killed", folder) as process:
        wait_for_parts(folder, 3)
        for running in [psutil.Process(process.pid), *killable(folder)]:
            running.kill()
        process.wait(1800)
    assert not (folder / "killed" / "resident").exists()
    left = {path: path.read_bytes() for path in (folder / "unfinished").rglob("part-*.json")}
    assert len(left) >= 6
    with launched("killed", folder) as again:
        output, _ = again.communicate(timeout=1800)
        assert again.returncode == 0, output[-5000:]
    assert all(path.read_bytes() == data for path, data in left.items())
    for part in ("base", "stored", "resident"):
        assert_same(folder / "one" / part, folder / "killed" / part)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_process_is_killed_the_job_ends(tmp_path: Path, victim: int) -> None:
    prepare(tmp_path)
    with launched("killed", tmp_path) as process:
        wait_for_parts(tmp_path, 1)
        killable(tmp_path)[victim].kill()
        output, _ = process.communicate(timeout=1800)
        assert process.returncode != 0
        assert f"rank      : {victim}" in output and "SIGKILL" in output
        assert still_running(tmp_path) == []
