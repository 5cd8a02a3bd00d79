"""The dtype of an evaluation that names none: the baseline's own on an accelerator, float32 on a CPU."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mlflow_compress.commands.evaluate.models import open_baseline, open_variant
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.main.run import variant_key
from mlflow_compress.config.groups import EngineConfig, InferenceConfig, SourceConfig
from mlflow_compress.engines.file_model import open_request
from mlflow_compress.engines.interface import ENGINES, ModelRequest
from mlflow_compress.models.loading import load_model
from tests.compress_models import make_llama


@pytest.mark.parametrize(
    ("named", "computes_on", "expected"),
    [("auto", "cpu", "float32"), ("auto", "cuda", "bfloat16"), ("float16", "cpu", "float16")],
)
def test_no_named_dtype_is_the_checkpoints_own_on_an_accelerator(
    named: str, computes_on: str, expected: str, tmp_path: Path
) -> None:
    base = make_llama(tmp_path / "base", dtype=torch.bfloat16)
    request = ModelRequest(address=str(base), source=SourceConfig(device="cpu"), inference=InferenceConfig(dtype=named))
    model = open_request(request, computes_on=computes_on)
    assert model.dtype == getattr(torch, expected)
    assert load_model(model.config).dtype == getattr(torch, expected)


def test_on_a_cpu_it_is_the_evaluation_of_float32_and_the_variant_has_the_baselines(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", dtype=torch.bfloat16)
    variant = make_llama(tmp_path / "variant", dtype=torch.float16)
    config = EvaluateConfig(model=str(base), checkpoint=str(variant), device="cpu")
    opened = open_baseline(config)
    assert opened.identity == open_baseline(config.with_values(dtype="float32")).identity
    keys = {variant_key(MainConfig(dtype=dtype, judge=True), "folder", "evaluation") for dtype in ("auto", "float32")}
    assert len(keys) == 1
    on_an_accelerator = replace(opened, dtype=torch.bfloat16)  # type: ignore[type-var]
    assert str(open_variant(config, on_an_accelerator).dtype) == "torch.bfloat16"


@pytest.mark.parametrize(("device", "expected"), [("cpu", torch.float32), ("NVIDIA H200", torch.bfloat16)])
def test_in_vllm_the_device_of_its_environment_decides(
    device: str, expected: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_llama(tmp_path / "base", dtype=torch.bfloat16)
    described = {"vllm": "1", "device": device}
    monkeypatch.setattr("mlflow_compress.engines.vllm.vllm_process.described_environment", lambda python: described)
    running = EngineConfig(engine="vllm", vllm_python=sys.executable)
    with ENGINES.get("vllm").started(running, on_gpu=None):
        request = ModelRequest(address=str(base), source=SourceConfig(device="cpu"), running=running)
        assert ENGINES.get("vllm").open(request).dtype == expected
