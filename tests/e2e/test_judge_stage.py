"""The judge stage with a judge that fails in part: everything is logged, nothing secret is written, money is counted."""

import re
from pathlib import Path
from typing import Any

import pytest

from mlflow_compress import demo
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.judge.run import run_judge
from mlflow_compress.compression import compress_model
from mlflow_compress.errors import JudgeError
from mlflow_compress.home import home
from mlflow_compress.records import RunRecords
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.tracker import Tracker
from tests.judge_server import Raw, completion, judge_server

pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore")]

KEY, PASSWORD = "sk-test-9876543210-secret", "pass-w0rd-1234"
USAGE = {"prompt_tokens": 100, "completion_tokens": 20}


def test_a_judge_that_fails_in_part_is_logged_whole_and_shows_no_secret(
    workdir: Path, tracker: Tracker, monkeypatch: pytest.MonkeyPatch, no_fresh_process: None
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    compress_model(str(demo.MODEL_DIR), "none", None, [], workdir / "out")
    (workdir / "prices.yaml").write_text("j: {prompt: 30, completion: 60}")
    said: list[str] = []
    healthy = False
    stops = False

    def script(number: int, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if number % 4 == 0 and not healthy:
            return 400, {"error": {"message": f"no {KEY}"}}
        if stops and number > paid_before_the_stop:
            return 401, {"error": {"message": f"no {KEY}"}}
        verdict = "[[A]]" if "Assistant B" in str(body) else "[[7]]"
        return 200, completion(f"{KEY} {verdict}", "j-1", usage=USAGE)

    with judge_server(script) as server:
        asked = JudgeConfig(
            checkpoint=str(workdir / "out"),
            instruction_limit=1,
            num_samples=2,
            max_new_tokens=8,
            judge_max_tokens="8",
            judge_model="j",
            judges="mt_bench,pairwise",
            judge_prices=str(workdir / "prices.yaml"),
            judge_base_url=server.base_url.replace("//", f"//user:{PASSWORD}@"),
        )
        with pytest.raises(JudgeError, match=r"have no rating.*judge_args: max_unscored=0.05") as error:
            run_judge(asked, say=said.append)
        assert re.search(r"Account: judgments .*; new calls \d+; .*cost .*; every reply is saved", str(error.value))
        [failed] = [
            run for run in tracker.client.search_runs([tracker.experiment_id]) if run.data.tags.get("stage") == "judge"
        ]
        assert failed.info.status == "FAILED"
        paid = sum(number % 4 != 0 for number in range(len(server.bodies)))
        assert failed.data.metrics["judge/calls"] == paid > 0
        assert failed.data.metrics["judge/cost"] == pytest.approx(paid * 0.0042, rel=1e-3)
        unscored = failed.data.metrics["judge/unscored/http_400"]
        assert unscored > 0 and "judge/mt_bench" in failed.data.metrics
        assert f"{unscored:.0f} http_400" in failed.data.tags["mlflow.note.content"]
        assert failed.data.params["judge_answered_by"] == "j-1"
        judgments = RunRecords.read(tracker.fetch(failed.info.run_id, RECORDS)).judgments
        assert judgments is not None and "http_400" in judgments.table.column("reason").to_pylist()

        healthy, before = True, len(server.bodies)
        found = run_judge(asked, say=said.append)
        # Answers of equal models are equal: both have each grade in common, and no pair is asked.
        assert len(server.bodies) - before == before - paid
        assert found["judge/mt_bench"].value == 7 and found["judge/win_rate"].value == 0.5
        assert any("cost" in line and "[judge] j:" in line for line in said)
    # A key that is withdrawn half-way stops at once; what was spent until then is logged.
    stops = True
    with judge_server(script) as server:
        paid_before_the_stop = 2
        with pytest.raises(JudgeError, match=r"refused the key.* Account: new calls 3; .*cost .*; run [0-9a-f]{32}"):
            run_judge(asked.with_values(judge_base_url=server.base_url, judge_concurrency=1))
    [newest, *_] = tracker.client.search_runs(
        [tracker.experiment_id], "tags.stage = 'judge'", order_by=["attributes.start_time DESC"]
    )
    assert newest.info.status == "FAILED" and newest.data.metrics["judge/calls"] == 3
    # Where every call times out there is an account too: what was sent may have to be paid for.
    with judge_server(lambda *_: Raw(silent=True)) as server:
        late = asked.with_values(judge_base_url=server.base_url, judge_max_retries=0)
        with pytest.raises(JudgeError, match=r"new calls 0, and \d+ more that were sent and never answered"):
            run_judge(late)
    written = [path for folder in (workdir, home(tracker.uri)) for path in folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".db" for path in written) and any(path.name == "judgments.jsonl" for path in written)
    shown = [str(error.value), *said]
    for secret in (KEY, PASSWORD):
        assert [path for path in written if secret.encode() in path.read_bytes()] == []
        assert not [text for text in shown if secret in text]


def test_without_a_judge_model_refusals_and_speed_are_logged(
    workdir: Path, tracker: Tracker, monkeypatch: pytest.MonkeyPatch, no_fresh_process: None
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    compress_model(str(demo.MODEL_DIR), "none", None, [], workdir / "out")
    asked = JudgeConfig(
        checkpoint=str(workdir / "out"),
        instruction_limit=1,  # of each of eight categories
        num_samples=2,
        max_new_tokens=8,
        judge_max_tokens="8",
        judges="mt_bench",
    )
    found = run_judge(asked)
    assert found["judge/refusals_pct"].n == found["judge/refusal_flips_pct"].n == 8
    assert found["judge/refusal_flips_pct"].value == 0.0 and found["judge/refusals_mcnemar_p"].value == 1.0
    [judged] = tracker.client.search_runs([tracker.experiment_id], "tags.stage = 'judge'")
    assert judged.data.metrics["judge/refusals_pct"] == found["judge/refusals_pct"].value
    for tag in ("baseline_answers_run_id", "answers_run_id"):
        answers = tracker.client.get_run(judged.data.tags[tag])
        assert answers.data.metrics["speed/answer_tokens_per_second"] > 0
