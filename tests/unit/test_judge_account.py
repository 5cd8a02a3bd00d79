"""What the judgments took, as report, note and terminal show it.

The judge stage on a checkpoint as other tools save them: without the chat template.
"""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlflow_compress import demo
from mlflow_compress.commands.evaluate.result import AnswerEvaluation
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.judge.run import _vectors, run_judge
from mlflow_compress.compression import compress_model
from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest, hash_others
from mlflow_compress.errors import ConfigError
from mlflow_compress.judges import Judged
from mlflow_compress.judges.judge_registry import AnswerVectors
from mlflow_compress.judges.session import spending_of
from mlflow_compress.kept import keeping
from mlflow_compress.reporting.answers_page import account_rows, account_text
from mlflow_compress.reporting.html import render_report
from mlflow_compress.tracking.tracker import Tracker

VALUES = {
    "judge/judgments": 320.0,
    "judge/unscored": 4.0,
    "judge/unscored/http_500": 1.0,
    "judge/unscored/ambiguous": 3.0,
    "judge/calls": 165.0,
    "judge/calls_without_usage": 2.0,
    "judge/prompt_tokens": 123456.0,
    "judge/completion_tokens": 34000.0,
    "judge/reasoning_tokens": 20000.0,
    "judge/cost": 1.23456,
}
ROWS = [
    ("Judgments", "320, 4 of them without a rating: 3 ambiguous, 1 http_500"),
    ("New calls", "165, 2 of them without a count of tokens"),
    ("Tokens of prompts", "123,456"),
    ("Tokens of replies", "34,000, of which 20,000 were reasoning"),
    ("Cost", "1.235, in the currency of judge_prices"),
]


def test_every_number_is_shown() -> None:
    assert account_rows(VALUES) == ROWS


def test_what_is_not_known_is_not_shown() -> None:
    given = {"judge/judgments": 4.0, "judge/unscored": 0.0, "judge/calls": 0.0}
    assert account_rows(given) == [("Judgments", "4, all with a rating"), ("New calls", "0")]
    assert account_text(given) == "judgments 4, all with a rating; new calls 0"
    assert account_rows({"judge/similarity": 0.9}) == [] and account_text({}) == ""


def test_the_report_and_the_terminal_show_it() -> None:
    page = render_report(title="t", verdict="v", results=[], judge_values=VALUES)
    for name, text in ROWS:
        assert re.search(rf'<th scope="row">{name}</th>\n<td class="long"><code>{re.escape(text)}</code></td>', page)
    assert "Judgments and their cost" not in render_report(title="t", verdict="v", results=[])
    found = AnswerEvaluation(name="n", results=(), records_folder=Path("r"), baseline="b", account=VALUES)
    assert [f"{name}: {text}" for name, text in ROWS] == found.as_text().splitlines()
    assert found.to_dict()["account"] == VALUES


def test_the_runs_of_a_sweep_share_one_budget_and_other_runs_do_not(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text("gpt-4: {prompt: 1000, completion: 1000}")
    config = JudgeConfig(judge_prices=str(tmp_path / "prices.yaml"), judge_max_cost=1.0).judging
    with keeping():
        first, second = spending_of(config), spending_of(config)
        assert first.begin(0.7) and not second.is_decided(0.7)
        first.end("gpt-4", 0.7, None, answered=True)  # without a count, it counts as the most that it can cost
        assert not second.begin(0.7) and second.begin(0.3)
        assert (first.calls, second.calls) == (1, 0)  # each run logs its own
    assert spending_of(config).begin(0.7) and spending_of(config).begin(0.7)


@pytest.mark.filterwarnings("ignore")
def test_both_models_are_asked_in_the_baselines_chat_template(
    workdir: Path, tracker: Tracker, no_fresh_process: None
) -> None:
    compress_model(str(demo.MODEL_DIR), "none", None, [], workdir / "out")
    (workdir / "out" / "chat_template.jinja").unlink()
    saved = CheckpointManifest.read(workdir / "out", verify=False)
    replace(saved, other_files=hash_others(workdir / "out")).write(workdir / "out")
    run_judge(
        JudgeConfig(
            checkpoint=str(workdir / "out"), instruction_limit=1, num_samples=2, max_new_tokens=8, judge_max_tokens="8"
        )
    )
    [judged] = tracker.find_finished("judge")
    # The same model under the same prompts: its sampled answers are exactly the baseline's second sample.
    assert judged.data.metrics["judge/similarity"] == judged.data.metrics["judge/similarity_floor"]
    assert judged.data.metrics["judge/identical_answers_pct"] == 100.0 and judged.data.metrics["judge/kl_greedy"] == 0.0
    # The runs of the baseline's answers are no variant's: they stand in the experiment beside this one.
    runs = tracker.client.search_runs([tracker.experiment_id])
    assert {run.data.tags["stage"] for run in runs} == {"judge", "answers", "greedy"}


@pytest.mark.filterwarnings("ignore")
def test_two_judges_that_embed_are_refused_and_named() -> None:
    same = {who: np.ones((1, 2, 3), dtype=np.float32) for who in ("baseline", "variant", "again")}
    vectors = AnswerVectors("instructions", ("i",), same, "encoder", "id")
    assert _vectors({"a": Judged(vectors=vectors), "rates": Judged()}) is vectors
    assert _vectors({"rates": Judged()}) is None
    with pytest.raises(ConfigError, match="a, b"):
        _vectors({"a": Judged(vectors=vectors), "b": Judged(vectors=vectors)})
