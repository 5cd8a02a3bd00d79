"""A checkpoint is compared with what it was made from, unless another baseline is asked for by name."""

from pathlib import Path

import pytest

import mlflow_compress as mc
from mlflow_compress.commands.command import configured
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.gate.parameters import GateConfig
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.speed.parameters import SpeedConfig
from tests.compress_models import make_llama
from tests.conftest import Fork


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, python: Fork) -> mc.CompressedModel:
    folder = tmp_path_factory.mktemp("own")
    return mc.compress(str(make_llama(folder / "finetuned")), "rtn", bits=4, group_size=32, store=folder / "results")


@pytest.mark.parametrize("command", [EvaluateConfig, JudgeConfig, SpeedConfig, GateConfig])
def test_the_default_baseline_is_the_checkpoint_s_own(checkpoint: mc.CompressedModel, command: type) -> None:
    base = checkpoint.manifest.base_model
    assert Path(base).name == "finetuned"
    assert configured(command, {"checkpoint": checkpoint}).source.model == base
    assert configured(command, {"checkpoint": checkpoint, "model": "demo"}).source.model == "demo"
    served = {"checkpoint": "endpoint:http://127.0.0.1:1/v1", "served_model": "x"}
    assert configured(command, served).source.model == "demo"


@pytest.mark.parametrize("stage", ["evaluate", "judge", "speed", "gate", "diagnose"])
def test_weights_that_it_was_not_made_from_are_refused_with_both_hashes(
    checkpoint: mc.CompressedModel, stage: str, tmp_path: Path
) -> None:
    with pytest.raises(mc.MlflowCompressError, match="was not made from this baseline") as raised:
        getattr(mc, stage)(checkpoint, model="demo", store=tmp_path / "results")
    message = str(raised.value)
    assert checkpoint.manifest.base_weights_hash in message and "demo, weights " in message
    assert not list(tmp_path.glob("results/*/run.json"))
