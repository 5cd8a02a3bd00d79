"""Loaded models, rows of items and data frames in place of folders and files; and the frame of compared items."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import mlflow_compress as mc
from mlflow_compress import demo
from mlflow_compress.commands.command import configured
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.gate.parameters import GateConfig
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.speed.parameters import SpeedConfig
from tests.compress_models import make_llama
from tests.conftest import Fork, forked_checks
from tests.roundoff import of_sum
from tests.stores import runs_in
from tests.task_files import sums, write_rows

ROWS = [
    {
        "id": str(n),
        "category": "sums",
        "question": f"{n} plus {n}?",
        "choices": [str(n), str(2 * n), str(3 * n)],
        "answer": 1,
    }
    for n in range(2, 14)
]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(demo.MODEL_DIR), AutoTokenizer.from_pretrained(demo.MODEL_DIR)


@pytest.mark.ci
def test_a_loaded_model_and_rows_give_the_numbers_of_folder_and_file(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    store = tmp_path / "results"
    other = AutoModelForCausalLM.from_pretrained(demo.MODEL_DIR)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.02 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    found = mc.evaluate(
        (other, loaded[1]), model=loaded, tasks={"sums": pd.DataFrame(ROWS)}, num_fewshot=0, store=store
    )

    # The same, by way of files.
    other.save_pretrained(tmp_path / "other")
    loaded[1].save_pretrained(tmp_path / "other")
    rows = tmp_path / "sums.jsonl"
    rows.write_text(pd.DataFrame(ROWS).to_json(orient="records", lines=True))
    made = mc.compress("demo", "checkpoint", checkpoint=tmp_path / "other", store=tmp_path / "files")
    by_files = mc.evaluate(made, tasks=rows, num_fewshot=0, store=tmp_path / "files")
    assert by_files.metrics == found.metrics and found["distance/kl_mean"].value > 0

    # The frame has one row per item, and says what the metrics say.
    items = found.items()
    assert len(items) == len(ROWS) and list(items.item_id) == [row["id"] for row in ROWS]
    assert set(items.gold) == {str(2 * n) for n in range(2, 14)} and items.prompt.str.contains("plus").all()
    flipped = items.baseline_correct != items.variant_correct
    assert 100 * flipped.mean() == found["distance/flips_pct"].value
    assert np.isclose(items.kl.mean(), found["distance/kl_mean"].value, rtol=of_sum(len(ROWS)))
    assert (items.change.isin(["c2w", "w2c"]) == flipped).all()
    assert (items.baseline != items.variant)[flipped].all()

    # Done once: the same model in memory is found again, also as a list of rows.
    again = mc.evaluate((other, loaded[1]), model=loaded, tasks={"sums": ROWS}, num_fewshot=0, store=store)
    assert again.variant_found_in == found.run.run_id
    assert [
        path.name for path in tmp_path.iterdir() if path.name not in ("results", "other", "sums.jsonl", "files")
    ] == []


def test_what_is_no_complete_model_is_refused(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(mc.MlflowCompressError, match=re.escape("Give model=(model, tokenizer)")):
        mc.compress(loaded[0], "rtn", store=tmp_path)
    with pytest.raises(mc.MlflowCompressError, match="not a loaded model followed by its tokenizer"):
        mc.evaluate((loaded[0], "gpt2"), store=tmp_path)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([{"id": "1", "question": "?"}, "demo"], "mixes rows of items"),
        ({"../up": ROWS}, "cannot be a path"),
        ([{**ROWS[0], "answer": object()}], "JSON cannot store"),
    ],
)
def test_wrong_rows_are_refused(tasks: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(mc.MlflowCompressError, match=message):
        mc.evaluate(demo.MODEL_DIR, tasks=tasks, store=tmp_path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, python: Fork) -> mc.CompressedModel:
    folder = tmp_path_factory.mktemp("own")
    with forked_checks(python):
        return mc.compress(
            str(make_llama(folder / "finetuned")), "rtn", bits=4, group_size=32, store=folder / "results"
        )


@pytest.mark.parametrize("command", [EvaluateConfig, JudgeConfig, SpeedConfig, GateConfig])
def test_the_default_baseline_is_the_checkpoint_s_own(checkpoint: mc.CompressedModel, command: type) -> None:
    base = checkpoint.manifest.base_model
    assert Path(base).name == "finetuned"
    assert configured(command, {"checkpoint": checkpoint}).source.model == base
    assert configured(command, {"checkpoint": checkpoint, "model": "demo"}).source.model == "demo"
    served = {"checkpoint": "endpoint:http://127.0.0.1:1/v1", "endpoint_args": {"served_model": "x"}}
    assert configured(command, served).source.model == "demo"


@pytest.mark.parametrize("stage", ["evaluate", "judge", "speed", "gate", "diagnose"])
def test_weights_that_it_was_not_made_from_are_refused_with_both_hashes(
    checkpoint: mc.CompressedModel, stage: str, tmp_path: Path
) -> None:
    with pytest.raises(mc.MlflowCompressError, match="was not made from this baseline") as raised:
        getattr(mc, stage)(checkpoint, model="demo", store=tmp_path / "results")
    message = str(raised.value)
    assert checkpoint.manifest.base_weights_hash in message and "demo, weights " in message
    assert not runs_in(tmp_path / "results")


def test_a_reason_lets_it_be_compared_with_others_and_is_shown_and_logged(
    checkpoint: mc.CompressedModel, tmp_path: Path
) -> None:
    other = str(make_llama(tmp_path / "pretrained", seed=1))
    asked: dict[str, Any] = {
        "model": other,
        "tasks": str(write_rows(tmp_path / "cloze.jsonl", sums(2, choices=["two", "four or more"], answer=0))),
        "num_fewshot": 0,
        "num_shuffles": 0,
        "store": tmp_path / "results",
    }
    for no_reason in (True, "false", "1"):
        with pytest.raises(mc.MlflowCompressError, match=r"'other_baseline' of 'model_args'.*a reason in words"):
            mc.evaluate(checkpoint, model_args={"other_baseline": no_reason}, **asked)
    found = mc.evaluate(checkpoint, model_args={"other_baseline": "tuned from it"}, **asked)
    assert "Baseline pretrained, other_baseline tuned from it" in found.account.sentence
    again = mc.evaluate(checkpoint, model_args={"other_baseline": "its teacher"}, **asked)
    assert "other_baseline its teacher" in again.account.sentence and "tuned from it" not in again.account.sentence
    logged = {run.data.params.get("other_baseline") for run in runs_in(tmp_path / "results")}
    assert logged == {None, "tuned from it", "its teacher"}  # None: the baseline's own run
