"""80 questions of two turns at an endpoint that fails at 30 % of the calls: nothing is lost, and nothing paid twice."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mlflow_compress.judges.asking import gradings
from tests.judge_server import PAID, PASSING, FaultyJudge, judge_server, question_of
from tests.judging import KEY, answers, grade, instructions

ATTEMPTS = 3
ITEMS = instructions(80)
SETTINGS: dict[str, Any] = {"judge_timeout": 0.5, "judge_attempts": ATTEMPTS, "judge_max_unscored": 1.0}
# The process that is killed: it grades as the judge stage does.
COMMAND = """
import sys
from pathlib import Path
from tests.unit.test_judge_faults import ITEMS, SETTINGS, grade
grade(sys.argv[1], Path(sys.argv[2]), *ITEMS, **SETTINGS)
"""


def check_records(judged: Any, script: FaultyJudge) -> None:
    """Check that every judgment is there once, with its own rating or the reason why it has none."""
    found = judged.judgments["variant"]
    keys = found.key_rows()
    assert len(keys) == len(set(keys)) == 160
    asked = {(one.item.item_id, one.turn): one.question.prompt for one in gradings(ITEMS, answers(*ITEMS))}
    unscored: Counter[str] = Counter()
    for row in found.table.to_pylist():
        if row["score"] is None:
            unscored[row["reason"]] += 1
            continue
        assert row["reason"] is None
        prompt = asked[row["item_id"], row["turn"]]
        assert row["score"] == script.rating(question_of({"messages": prompt.messages}))
    assert judged.values["judge/judgments"] == 160 and judged.values["judge/unscored"] == unscored.total()
    for reason, number in unscored.items():
        assert judged.values[f"judge/unscored/{reason}"] == number
    assert unscored.total() <= 8  # 5 %, the default limit


def test_every_judgment_is_scored_or_unscored_with_its_reason(tmp_path: Path) -> None:
    script = FaultyJudge(wait=1.0)
    with judge_server(script) as server:
        judged = grade(server.base_url, tmp_path, *ITEMS, **SETTINGS)
        calls = len(server.bodies)
    assert set(script.injected) == {*PASSING, *PAID}
    assert 0.25 < script.injected.total() / calls < 0.35
    check_records(judged, script)
    # Each question was paid for once, and once more for each paid reply that could not be read, up to the attempts.
    unreadable = sum(script.injected[kind] for kind in PAID)
    assert script.paid.total() == 160 + unreadable - judged.values["judge/unscored"]
    assert max(script.paid.values()) <= ATTEMPTS
    assert judged.values["judge/calls"] == script.paid.total()


@pytest.mark.slow
@pytest.mark.ci
def test_after_kill_9_half_way_no_paid_reply_is_asked_for_again(tmp_path: Path) -> None:
    script = FaultyJudge(wait=1.0, latency=0.05)
    cache = tmp_path / "judgments.jsonl"
    with judge_server(script) as server:
        environment = {**os.environ, "OPENAI_API_KEY": KEY}
        command = [sys.executable, "-c", COMMAND, server.base_url, str(tmp_path)]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while (cache.read_bytes().count(b"\n") if cache.exists() else 0) < 60:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(1.5)  # the server finishes the calls that were under way
        kept = cache.read_bytes().count(b"\n")
        before, under_way = script.paid.copy(), script.paid.total() - kept
        assert 60 <= kept < 160 and 0 <= under_way <= 16
        judged = grade(server.base_url, tmp_path, *ITEMS, **SETTINGS)
    check_records(judged, script)
    # What was kept was not asked again: all replies that were paid for are in the cache, but those that were under way.
    assert script.paid.total() - before.total() == judged.values["judge/calls"]
    assert cache.read_bytes().count(b"\n") == script.paid.total() - under_way
    assert max(script.paid.values()) <= ATTEMPTS + 1  # one reply may have been under way
