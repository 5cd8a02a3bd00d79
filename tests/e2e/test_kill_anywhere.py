"""Ten kills at random moments of quantize, evaluate, judge, promote and sweep: what is found is as undisturbed."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kill_anywhere import KINDS, table
from benchmarks.killed_store import Outcome, differences

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_ten_kills(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/kill_anywhere.py", "--count", "10", "--seed", "7", "--keep", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as undisturbed") == 10


def outcome(**changed: object) -> Outcome:
    whole = {
        "metrics": {"evaluate rtn": {"a": 1.0}},
        "verdicts": {"evaluate rtn": "same"},
        "versions": (("demo", "1"),),
        "aliases": (("demo@champion", "1"),),
        "running": 0,
        "finished": 2,
        "bytes": 1000,
    }
    return Outcome(**{**whole, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, {}),
        (
            {"metrics": {"evaluate rtn": {"a": 1.0000001}}},
            {"metrics": "other metrics: evaluate rtn a 1.0000001 for 1.0"},
        ),
        ({"metrics": {}}, {"metrics": "other metrics: evaluate rtn a None for 1.0"}),
        ({"versions": (("demo", "1"), ("demo", "2"))}, {"registry": "versions (('demo', '1'), ('demo', '2'))"}),
        ({"aliases": ()}, {"registry": "aliases ()"}),
        ({"verdicts": {"evaluate rtn": "other"}}, {"metrics": "other verdicts"}),
        ({"running": 1}, {"RUNNING": "1 left RUNNING"}),
        ({"bytes": 1000 + 64 * 1024}, {}),
        ({"bytes": 1001 + 64 * 1024}, {"disk": "65,537 bytes more on disk"}),
        ({"finished": 3, "verdicts": {}, "bytes": 10**9}, {}),  # it was killed after its end, and has run twice
    ],
)
def test_what_counts_as_different(changed: dict[str, object], said: dict[str, str]) -> None:
    assert differences(outcome(**changed), outcome()) == said
    assert said.keys() <= {*KINDS}


def test_the_table_counts_kills_by_command_and_by_what_is_wrong() -> None:
    kill = {"command": "promote", "signal": "SIGINT", "written": True, "open_runs": 1, "undisturbed_s": 4.0}
    wrong = {"disk": "1 byte more", "RUNNING": "1 left RUNNING"}
    rows = [{**kill, "wrong": {}}, {**kill, "signal": "SIGKILL", "written": False, "open_runs": 0, "wrong": wrong}]
    *_, line = table(rows).splitlines()
    assert line == "| `promote` | 4 | 2 (1 SIGINT, 1 SIGKILL) | 1 | 1 | 1 | 0 | 0 | 1 | 0 | 1 | 0 | 0 |"
