"""A model known from its files says of itself what the loaded model says, and no weight is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mlflow_compress import demo
from mlflow_compress.errors import AlignmentError, CheckpointError, StoreError
from mlflow_compress.models.identity import check_same_tokenizer, tokenizer_hash
from mlflow_compress.models.light_model import open_light
from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from tests.unit.scoring_models import load_random, mixed_requests

FIELDS = ("weights", "path", "dtype", "device", "vocab_size", "max_length", "config")


def dropped(folder: Path, *names: str) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in names}))
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_it_agrees_with_the_loaded_model(name: str, dtype: str, tmp_path: Path) -> None:
    load_random(name, path=tmp_path)
    config = LoadConfig(path=str(tmp_path), dtype=dtype, device="cpu")
    light, loaded = open_light(config), load_model(config)
    assert {f: getattr(light, f) for f in FIELDS} == {f: getattr(loaded, f) for f in FIELDS}
    assert tokenizer_hash(light.tokenizer) == tokenizer_hash(loaded.tokenizer)
    check_same_tokenizer(light, loaded)


def test_it_agrees_on_the_demo() -> None:
    config = LoadConfig(path=str(demo.MODEL_DIR), dtype="auto")
    light, loaded = open_light(config), load_model(config)
    assert {f: getattr(light, f) for f in FIELDS} == {f: getattr(loaded, f) for f in FIELDS}


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_dtype_that_the_configuration_does_not_name_is_the_weights_own(stored: torch.dtype, tmp_path: Path) -> None:
    load_random("llama", path=tmp_path)
    dropped(tmp_path, "dtype", "torch_dtype")
    file = tmp_path / "model.safetensors"
    save_file({k: v.to(stored) for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    config = LoadConfig(path=str(tmp_path), dtype="auto", device="cpu")
    assert open_light(config).dtype == load_model(config).dtype == stored


def test_no_weight_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_random("llama", path=tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    assert open_light(LoadConfig(path=str(tmp_path))).weights


def test_a_store_accepts_it_and_refuses_anothers(tmp_path: Path) -> None:
    loaded = load_random("llama", path=tmp_path / "model")
    with StateWriter(tmp_path / "store", loaded) as writer:
        Scorer(loaded, ScoringConfig(progress=False)).score(mixed_requests()[:8], capture=writer)
    light = open_light(LoadConfig(path=str(tmp_path / "model"), device="cpu"))
    assert StateStore.open(tmp_path / "store", baseline=light).n_rows
    load_random("llama", seed=1, path=tmp_path / "other", adds_bos=False)
    other = open_light(LoadConfig(path=str(tmp_path / "other")))
    with pytest.raises(StoreError, match="other weights"):
        StateStore.open(tmp_path / "store", baseline=other)
    with pytest.raises(AlignmentError, match="differ in post_processor"):
        check_same_tokenizer(light, other)


def test_what_is_missing_or_broken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such model folder"):
        open_light(LoadConfig(path=str(tmp_path / "nothing")))
    with pytest.raises(CheckpointError, match="Not a model folder"):
        open_light(LoadConfig(path=str(tmp_path)))
    load_random("llama", path=tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_light(LoadConfig(path=str(tmp_path)))
