"""A sweep with a judge model: the estimate is shown, and the budget is that of all variants together."""

import json
from pathlib import Path

import pytest

import mlflow_compress as mc
from mlflow_compress.errors import SweepError
from mlflow_compress.tracking.tracker import Tracker
from tests.judge_server import completion, judge_server
from tests.judging import KEY

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
USAGE = {"prompt_tokens": 100, "completion_tokens": 2000}


def test_all_variants_share_one_budget_and_the_same_command_goes_on(
    tracker: Tracker, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = [{"question_id": i, "category": "c", "turns": [f"Say {i}"]} for i in range(2)]
    (workdir / "say.jsonl").write_text("".join(json.dumps(row) + "\n" for row in says))
    # A call costs 2.1, and could cost 2.05 for its reply and less than 0.6 for its prompt. So 10 pays for four calls:
    # two answers of the baseline and of the first variant, but not for those of the second.
    (workdir / "prices.yaml").write_text("j: {prompt: 1000, completion: 1000}\n")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    lines: list[str] = []
    few = {
        "limit": 2,
        "num_shuffles": 0,
        "task_args": {"noise_items": 2},
        "answer_args": {"num_samples": 2, "max_new_tokens": 4, "judge_max_tokens": 24},
    }
    with judge_server(lambda *_: (200, completion("[[5]]", "j", usage=USAGE)), model="j") as server:
        asked = {
            **few,
            "methods": "rtn",
            "bits": "2,3",
            "instructions": "say.jsonl",
            "judges": "mt_bench",
            "judge_model": "j",
            "judge_args": {"base_url": server.base_url, "prices": "prices.yaml", "max_cost": 10},
        }
        with pytest.raises(SweepError, match="Stopped at judge_args: max_cost: 2 of 4 judgments are saved"):
            mc.sweep(progress=lambda told: lines.append(told.line), **asked)
        assert len(server.bodies) == 4
        estimates = [line for line in lines if "[judge] j: " in line]
        assert len(estimates) == 2 and "rtn-2bit-g128: [judge] j: 4 judgments, 0 of them kept; 4 calls" in estimates[0]
        assert "2 calls" in estimates[1]
        swept = mc.sweep(**asked)
        assert len(server.bodies) == 6
    assert [row.status for row in swept.scoreboard.rows] == ["finished", "finished"]
    costs = sorted(run.data.metrics.get("judge/cost", 0.0) for run in tracker.find_finished("judge"))
    assert costs == pytest.approx([4.2, 8.4])
