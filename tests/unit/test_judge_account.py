"""What the judgments took, as report, note and terminal show it."""

from __future__ import annotations

import re
from pathlib import Path

from mlflow_compress.commands.evaluate.result import AnswerEvaluation
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.judges.session import spending_of
from mlflow_compress.kept import keeping
from mlflow_compress.reporting.answers_page import account_rows, account_text
from mlflow_compress.reporting.html import render_report

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
