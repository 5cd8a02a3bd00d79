"""Ten kills at random moments of quantize, evaluate, judge, promote and sweep: what is found is as undisturbed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kill_anywhere import Outcome, differences

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
        ({}, []),
        ({"metrics": {"evaluate rtn": {"a": 1.0000001}}}, ["metrics"]),
        ({"metrics": {}}, ["metrics"]),
        ({"versions": (("demo", "1"), ("demo", "2"))}, ["versions"]),
        ({"aliases": ()}, ["aliases"]),
        ({"verdicts": {"evaluate rtn": "other"}}, ["verdicts"]),
        ({"running": 1}, ["1 left RUNNING"]),
        ({"bytes": 1000 + 64 * 1024}, []),
        ({"bytes": 1001 + 64 * 1024}, ["65,537 bytes more on disk"]),
        ({"finished": 3, "verdicts": {}, "bytes": 10**9}, []),  # it was killed after its end, and has run twice
    ],
)
def test_what_counts_as_different(changed: dict[str, object], said: list[str]) -> None:
    assert differences(outcome(**changed), outcome()) == said
