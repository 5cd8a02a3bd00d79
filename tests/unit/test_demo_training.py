"""The trainer saves what a stage ends with, and goes on from there."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tools.demo_generator import training
from tools.demo_generator.stages import STAGES, Stage
from tools.demo_generator.training import Trainer

TINY = [
    Stage(name=stage.name, tokens=1300, kinds=stage.kinds, lengths=(64,), step_tokens=256, hint=stage.hint)
    for stage in STAGES[:2]
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer of little text, and no measuring."""
    monkeypatch.setattr(training, "TOKENIZER_DOCUMENTS", 500)
    monkeypatch.setattr(training, "accuracy", lambda *_, shots: float(shots))


def lines(folder: Path) -> list[tuple[str, int]]:
    text = (folder / "model" / "training_log.jsonl").read_text(encoding="utf-8")
    return [(line["stage"], line["tokens"]) for line in map(json.loads, text.splitlines())]


@pytest.mark.ci
def test_a_stage_ends_with_a_saved_model_and_another_run_goes_on_from_it(tmp_path: Path) -> None:
    first = Trainer(17, tmp_path)
    for stage in TINY:
        first.run(stage)
    # 1300 tokens are five steps of 256; the last one is logged and saved.
    wanted = [("exercises", 1280), ("single questions", 1280)]
    assert lines(tmp_path) == wanted
    saved = load_file(tmp_path / "model" / "model.safetensors")
    final = load_file(tmp_path / "after single questions.safetensors")
    assert all(torch.equal(saved[name], final[name].to(torch.bfloat16)) for name in final)

    again = Trainer(17, tmp_path)
    again.resume(TINY[0])
    again.run(TINY[1])
    assert lines(tmp_path) == wanted
    repeated = load_file(tmp_path / "after single questions.safetensors")
    assert all(torch.equal(repeated[name], final[name]) for name in final)  # the same steps from the same numbers
