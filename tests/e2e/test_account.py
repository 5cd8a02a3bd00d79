"""What was asked and what became of it stands in the first lines of a result, on its run, and before every gate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mlflow_compress as mc
from mlflow_compress.metrics.core.account import Account
from tests.conftest import Fork

SENTENCE = "The miller counts the sacks of flour. "


def rows(n: int, *, long: int = 0, too_long: int = 0) -> list[dict[str, object]]:
    """Questions with two answers; the first prompts are longer than the demo's context, the last options are."""
    return [
        {
            "id": f"q{i}",
            "category": "mill",
            "context": SENTENCE * (400 if i < long else 1),
            "choices": ["He is tired.", SENTENCE * (400 if i >= n - too_long else 1)],
            "answer": 0,
        }
        for i in range(n)
    ]


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory, python: Fork) -> mc.CompressedModel:
    return mc.compress("demo", "rtn", bits=4, store=tmp_path_factory.mktemp("account") / "results")


def evaluate(compressed: mc.CompressedModel, items: list[dict[str, object]]) -> mc.Evaluation:
    return mc.evaluate(compressed, tasks=items, noise_items=2, store=compressed.folder.parents[1] / "results")


def test_cut_prompts_are_counted_and_the_verdict_says_so(compressed: mc.CompressedModel) -> None:
    found = evaluate(compressed, rows(8, long=2))
    assert isinstance(found.account, Account)
    assert (found.account.asked, found.account.scored, found.account.cut) == (8, 8, 2)
    assert found.verdict.endswith("; 2 of 8 prompts were cut to the model's context")
    lines = found.as_text().splitlines()
    assert lines[0] == found.verdict
    assert lines[1].startswith(
        "Account: all 8 items scored; 2 of 8 prompts were cut to the model's context. Baseline demo"
    )
    assert "engine local" in lines[1] and "dtype float32" in lines[1] and "threads " in lines[1]
    assert not found.check(max_kl=9, max_flips_pct=100, max_accuracy_drop_pct=100, max_kl_outliers_pct=100).passed
    run = Path(str(found.records_folder)).parent
    assert Account.from_dict(json.loads((run / "account.json").read_text())) == found.account
    # The same again is found in the store, with its account.
    assert evaluate(compressed, rows(8, long=2)).account == found.account


def test_there_is_no_verdict_where_items_have_no_score(compressed: mc.CompressedModel) -> None:
    found = evaluate(compressed, rows(8, too_long=3))
    reason = "3 of 8 items have no score (an option is longer than the model's context: 3)"
    assert f": no verdict, because {reason}; " in found.verdict
    assert found.to_dict()["account"]["unscored"] == {"an option is longer than the model's context": 3}
    check = found.check()
    assert not check.passed and "37.5 % of the items have no score > 1 %" in check.reasons
    gate = mc.gate(compressed, tasks=rows(8, too_long=3), store=compressed.folder.parents[1] / "results")
    assert not gate.passed and "37.5 % of the items have no score > 1 %" in gate.verdict
    assert gate.as_text().splitlines()[1].startswith("Account: 3 of 8 items have no score (the baseline gave none: 3)")
