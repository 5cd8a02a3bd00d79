"""Kills in the judge, while a run is published and while one is promoted: `resume` ends with what nobody disturbed."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.kill_anywhere import ANSWERS, BOUNDS, TASKS, write_inputs
from benchmarks.killed_store import Store, differences
from tests.judge_server import Answer, FaultyJudge, judge_server

pytestmark = pytest.mark.slow

ASKING = ("--judge_args", "concurrency=1", "--judge_model", "gpt-4", "--judges", "mt_bench")
MAIN = ("main", "--method", "rtn", "--bits", "4", "--speed", "false", *TASKS, *ANSWERS, *ASKING)
PROMOTE = ("promote", *BOUNDS)
LOST = 5  # the number of the call to the judge that is under way at the kill

# The command line, where one function is the last that its process does.
_DIES = """
import importlib, os, sys
from mlflow_compress.cli import main

module, _, path = sys.argv[1].partition(":")
*inside, name = path.split(".")
owner = importlib.import_module(module)
for one in inside:
    owner = getattr(owner, one)
whole = getattr(owner, name)

def last(*args, **options):
    whole(*args, **options)
    os.kill(os.getpid(), 9)

setattr(owner, name, last)
sys.exit(main(sys.argv[2:]))
"""


class KillingJudge(FaultyJudge):
    """A judge that kills whoever asks for the reply `LOST`: the command, and the stage that it has started."""

    asking: subprocess.Popen[bytes] | None = None

    def __call__(self, number: int, body: Mapping[str, Any]) -> Answer:
        if self.asking is not None and number == LOST:
            process = psutil.Process(self.asking.pid)
            for one in (process, *process.children(recursive=True)):
                one.kill()
        return super().__call__(number, body)


def test_judge_publish_and_promote_are_killed_and_resumed(tmp_path: Path) -> None:
    stores, paid = {}, {}
    for name in ("undisturbed", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        write_inputs(folder)
        judge = KillingJudge(share=0.0)
        with judge_server(judge) as server:
            environment = {"OPENAI_BASE_URL": server.base_url, "OPENAI_API_KEY": "local"}
            stores[name] = store = Store(folder, environment)

            def dies(
                where: str, *command: str, store: Store = store, environment: dict[str, str] = environment
            ) -> None:
                places = {"MLFLOW_TRACKING_URI": store.uri, **environment}
                code = subprocess.run(
                    [sys.executable, "-c", _DIES, where, *command], cwd=store.folder, env={**os.environ, **places}
                ).returncode
                assert code == -9

            if name == "undisturbed":
                store.run(MAIN)
                store.run(PROMOTE)
            else:
                judge.asking = store.start(MAIN)  # type: ignore[assignment]
                assert judge.asking.wait() == -9
                judge.asking = None
                dies("mlflow_compress.tracking.tracked_run:TrackedRun.log_figures", "resume")
                store.run(("resume",))
                assert "1 command: 1 finished" in store.log.read_text()
                dies("mlflow_compress.commands.promote.run:_apply", *PROMOTE)
                store.run(("resume",))
                assert "1 command: 1 finished" in store.log.read_text()
                store.run(("resume",))
                assert "Nothing to resume" in store.log.read_text()
            paid[name] = Counter(judge.paid)
    found, undisturbed = (stores[name].outcome() for name in ("killed", "undisturbed"))
    assert differences(found, undisturbed) == {}
    assert found.finished == undisturbed.finished  # no twins
    again = paid["killed"] - paid["undisturbed"]
    assert again.total() == 1 and not paid["undisturbed"] - paid["killed"]  # the one that was under way
