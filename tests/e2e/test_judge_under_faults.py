"""The judge's command on 80 questions of two turns, at an endpoint that fails at 30 % of the calls, killed half-way."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from mlflow_compress.records import Judgments
from mlflow_compress.reporting.answers_page import from_jsonl
from mlflow_compress.tracking.tracker import Tracker
from tests.judge_server import PAID, PASSING, Answer, FaultyJudge, judge_server, question_of
from tests.judging import KEY
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
CONCURRENCY = 16
COMMAND = """
import sys
from mlflow_compress.cli import main
from tests.judge_server import giving_up_on_silence
with giving_up_on_silence():
    sys.exit(main(sys.argv[1:]))
"""


@dataclass
class FaultyPanel(FaultyJudge):
    """The same faults, for comparisons in pairs too."""

    def __call__(self, number: int, body: Mapping[str, Any]) -> Answer:
        """Answer one call: a rating, or a verdict where one is asked for."""
        answer = super().__call__(number, body)
        if isinstance(answer, str) and "[[C]]" in body["messages"][0]["content"]:
            return f"Compared. [[{'ABC'[self.rating(question_of(body)) % 3]}]]"
        return answer


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "OPENAI_API_KEY": KEY,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    log = (folder / "log.txt").open("ab")
    command = [sys.executable, "-c", COMMAND, *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)


def judge(folder: Path, base_url: str) -> subprocess.Popen[bytes]:
    [checkpoint] = [path.parent for path in folder.glob("out/*/config.json")]
    few = ["--answer_args", "num_samples=2,max_new_tokens=2,judge_max_tokens=4"]
    asked = ["--judges", "mt_bench,pairwise", "--judge_args", "max_unscored=1"]
    places = ["--checkpoint", str(checkpoint), "--instructions", "say.jsonl"]
    return start(folder, "judge", *places, *few, *asked, "--judge_args", f"base_url={base_url}")


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_killed_half_way_and_run_again_nothing_is_lost_paid_twice_or_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = [
        {"question_id": i, "category": "writing", "turns": [f"Tell of day {i}.", "And of the next day."]}
        for i in range(80)
    ]
    (tmp_path / "say.jsonl").write_text("".join(json.dumps(row) + "\n" for row in says))
    assert start(tmp_path, "quantize", "--method", "rtn", "--bits", "3", "--output_dir", "out").wait() == 0
    script = FaultyPanel(most_paid=220)
    with judge_server(script) as server:
        process = judge(tmp_path, server.base_url)
        try:
            until(
                lambda: sum(map(lines, tmp_path.rglob("judgments.jsonl"))) >= 200,
                ended=lambda: process.poll() is not None,
                said=lambda: (tmp_path / "log.txt").read_text()[-3000:],
            )
        finally:
            process.kill()
            process.wait()
            script.goes_on.set()
    # The server has ended the calls that were under way.
    n_calls = len(server.bodies)
    [cache] = tmp_path.rglob("judgments.jsonl")
    kept, paid = lines(cache), script.paid.total()
    assert 200 <= kept <= 220 and 0 <= paid - kept <= CONCURRENCY
    with judge_server(script, port=urlsplit(server.base_url).port) as server:
        assert judge(tmp_path, server.base_url).wait() == 0, (tmp_path / "log.txt").read_text()[-3000:]
        n_calls += len(server.bodies)
    assert set(script.injected) == {*PASSING, *PAID}
    assert 0.25 < script.injected.total() / n_calls < 0.35

    # No paid call was repeated: every reply is in the cache, but those that were under way at the kill.
    assert lines(cache) == script.paid.total() - (paid - kept)

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    tracker = Tracker()
    [run] = tracker.find_finished("judge")
    variant = Judgments.read(tracker.fetch(run.info.run_id, "records"))
    baseline = Judgments.read(tracker.fetch(run.info.run_id, "baseline_grades"))
    found = [*variant.table.to_pylist(), *({**row, "task": "baseline"} for row in baseline.table.to_pylist())]
    keys = Counter((row["task"], row["item_id"], row["turn"], row["repeat"]) for row in found)
    assert set(keys.values()) == {1}
    assert Counter(row["task"] for row in found) == {"mt_bench": 160, "baseline": 160, "pairwise": 320}
    assert all((row["score"] is None) == (row["reason"] is not None) for row in found)
    asked = [row for row in found if row["judge"] != "none"]  # identical answers are ties without a question
    unscored = Counter(row["reason"] for row in asked if row["reason"])
    metrics = run.data.metrics
    assert metrics["judge/judgments"] == len(asked) and metrics["judge/unscored"] == unscored.total()
    assert {reason: metrics[f"judge/unscored/{reason}"] for reason in unscored} == unscored
    assert unscored.total() <= 0.05 * len(asked)
    assert {row["score"] for row in asked if row["task"] == "pairwise" and row["score"] is not None} == {0.0, 0.5, 1.0}

    # The answers side by side have the same grades.
    folder = tracker.fetch(run.info.run_id, "answers")
    pairs = from_jsonl((folder / "answers.jsonl").read_text(encoding="utf-8"), "answers")
    grades = {(row["item_id"], row["turn"]): row["score"] for row in variant.where(task="mt_bench").table.to_pylist()}
    assert {(p.item_id, p.turn): p.grades_variant.get("") for p in pairs} == grades
    drops = [pair.drop for pair in pairs if pair.drop is not None]
    assert drops == sorted(drops, reverse=True) and len(pairs) == 160

    # The key is in no file: log, database, artifacts, cache.
    assert [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()] == []
