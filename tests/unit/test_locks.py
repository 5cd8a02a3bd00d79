"""Lock files go with the work that they guard, and keep it apart while they come and go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import mlflow_compress as mc
from mlflow_compress.files import alone_with
from tests.judge_server import completion, judge_server
from tests.judging import KEY

# The folder can be made by one process only. Nothing is left of it, so that each round can fail.
_ROUNDS = """
import os, sys
from pathlib import Path
from mlflow_compress.files import alone_with

for _ in range(int(sys.argv[1])):
    with alone_with(Path("work.lock")):
        os.mkdir("alone")
        count = int(Path("count").read_text())
        Path("count").write_text(str(count + 1))
        os.rmdir("alone")
"""


def test_processes_that_fight_for_a_lock_that_is_deleted_are_alone(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    command = [sys.executable, "-c", _ROUNDS, "100"]
    fighting = [subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate(timeout=120)[1] for process in fighting]
    assert [process.returncode for process in fighting] == [0] * 4, said
    assert (tmp_path / "count").read_text() == "400"
    assert [path.name for path in tmp_path.iterdir()] == ["count"]


def test_who_does_not_wait_is_told(tmp_path: Path) -> None:
    lock = tmp_path / "work.lock"
    with pytest.raises(RuntimeError), alone_with(lock) as first, alone_with(lock, wait=False) as second:
        assert first and not second and lock.exists()
        raise RuntimeError
    assert not lock.exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_lock_stays_behind(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"limit": 2, "num_shuffles": 0, "noise_items": 2}
    made = mc.compress(method="rtn")
    mc.evaluate(made, **few)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with judge_server(lambda *_: (200, completion("[[5]]", "j")), model="j") as server:
        mc.judge(
            made,
            instruction_limit=2,
            max_new_tokens=4,
            judges="mt_bench",
            judge_model="j",
            judge_base_url=server.base_url,
        )
    mc.sweep(methods="rtn", bits="8", judge=False, **few)
    left = {path for path in workdir.rglob("*.lock") if "processes" not in path.parts}  # this process lives
    assert left == set()
