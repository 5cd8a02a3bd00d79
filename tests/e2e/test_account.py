"""What was asked and what became of it stands in the first lines of a result, on its run, and before every gate."""

import json
from pathlib import Path
from typing import Any

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
    return mc.evaluate(
        compressed, tasks=items, task_args={"noise_items": 2}, store=compressed.folder.parents[1] / "results"
    )


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
    assert ": open under the default policy: 37.5 % of the items have no score > 1 %; " in found.verdict
    assert "; 3 of 8 items have no score (an option is longer than the model's context: 3)" in found.verdict
    assert found.to_dict()["account"]["unscored"] == {"an option is longer than the model's context": 3}
    check = found.check()
    assert not check.passed and "37.5 % of the items have no score > 1 %" in check.reasons
    gate = mc.gate(compressed, tasks=rows(8, too_long=3), store=compressed.folder.parents[1] / "results")
    assert not gate.passed and "37.5 % of the items have no score > 1 %" in gate.verdict
    assert gate.as_text().splitlines()[1].startswith("Account: 3 of 8 items have no score (the baseline gave none: 3)")


def question(**fields: object) -> list[dict[str, object]]:
    return [{**row, **fields} for row in rows(4)]


LETTERS = [{"id": f"l{i}", "category": "m", "question": f"Which is {i}?", "choices": list("abcd")} for i in range(4)]
# What is asked -> items of it, or None where it is an error that says why
ASKED: dict[str, tuple[dict[str, Any], int | None, str]] = {
    "all": ({"tasks": rows(4)}, 4, ""),
    "a smaller limit": ({"tasks": rows(4), "limit": 3}, 3, ""),
    "a larger limit": ({"tasks": rows(4), "limit": 100}, 4, ""),
    "no noise floor": ({"tasks": rows(4), "task_args": {"noise_items": 0}}, 4, ""),
    "a noise floor of more items than there are": ({"tasks": rows(4), "task_args": {"noise_items": 100}}, 4, ""),
    "two tasks": ({"tasks": {"a": rows(3), "b": rows(2)}}, 5, ""),
    "a task twice": ({"tasks": "{a},{a}"}, None, "Two tasks have the same name"),
    "two families in one file": ({"tasks": [*rows(3), {**LETTERS[0], "answer": 1}]}, None, "'context' is missing"),
    "no rows": ({"tasks": []}, None, "'tasks' names no task"),
    "a task without rows": ({"tasks": {"a": []}}, None, "a task without rows. Got: 'a'"),
    "no tasks": ({"tasks": {}}, None, "'tasks' names no task"),
    "no answer": ({"tasks": question(answer=None)}, None, "answer"),
    "an answer before the first": ({"tasks": question(answer=-1)}, None, "not the index of a choice"),
    "an answer as truth": ({"tasks": question(answer=True)}, None, "'answer' has the wrong type"),
    "an answer as fraction": ({"tasks": question(answer=0.0)}, None, "'answer' has the wrong type"),
    "a text that is too short": ({"tasks": "{text}"}, None, "corpus is too short"),
    "some options are too long": ({"tasks": rows(4, too_long=1)}, 4, "1 of 4 items has no score"),
    "all options are too long": ({"tasks": rows(4, too_long=4)}, 4, "4 of 4 items have no score"),
    "a few options are too long": ({"tasks": rows(120, too_long=1)}, 120, "1 of 120 items has no score"),
    "a prompt is too long": ({"tasks": rows(4, long=1)}, 4, "1 of 4 prompts was cut"),
    "drawn items": ({"tasks": rows(40), "items": 20}, 20, ""),
    "drawn items of fewer": ({"tasks": rows(4), "items": 20}, 4, ""),
    "another seed": ({"tasks": rows(4), "seed": 7}, 4, "; seed 7"),
    "more examples than rows": ({"tasks": rows(2), "num_fewshot": 5}, 2, ""),
    "another metric's key": ({"tasks": rows(4), "judge_limit": 3}, None, "Unknown parameter"),
}


@pytest.mark.parametrize("case", ASKED)
def test_a_figure_is_of_all_items_asked_for_or_the_first_line_says_so(
    case: str, compressed: mc.CompressedModel, tmp_path: Path
) -> None:
    asked, n, said = ASKED[case]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(4)))
    (tmp_path / "t.txt").write_text("Too short.")
    if isinstance(tasks := asked["tasks"], str):
        asked = {**asked, "tasks": tasks.format(a=tmp_path / "a.jsonl", text=tmp_path / "t.txt")}

    def work() -> mc.Evaluation:
        return mc.evaluate(
            compressed, **{"task_args": {"noise_items": 2}, "store": compressed.folder.parents[1] / "results", **asked}
        )

    if n is None:
        with pytest.raises(mc.MlflowCompressError, match=said):
            work()
        return
    found = work()
    account, first = found.account, found.as_text().splitlines()[0]
    assert account is not None and account.asked == n and said in first
    for name, result in found.pooled.items():
        # A metric of some families is of their items: of all of them that have a score, which the first line tells.
        missing = n - account.scored
        assert result.n_unscored == missing or not missing or "no verdict" in first or "no score" in first, name
    if "distance/flips_pct" in found.pooled:
        assert found["distance/flips_pct"].n == account.scored
    else:
        assert account.scored == 0
