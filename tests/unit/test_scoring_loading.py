"""Opening checkpoints: what is refused, and whose weights and tokenizer these are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mlflow_compress.errors import AlignmentError, CheckpointError, ConfigError
from mlflow_compress.models.identity import check_same_tokenizer, tokenizer_hash, weights_hash
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from tests.unit.scoring_models import CONFIGS, build_model, build_tokenizer, load_random


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    load_random("llama", path=path)
    return path


def test_a_saved_model_comes_back(folder: Path) -> None:
    loaded = load_model(LoadConfig(path=str(folder)))
    assert loaded.dtype == torch.float32
    assert not loaded.model.training
    assert (loaded.vocab_size, loaded.max_length) == (300, 160)
    half = load_model(LoadConfig(path=str(folder), dtype="bfloat16", device="cpu"))
    assert half.dtype == torch.bfloat16


def test_soft_capped_attention_is_not_run_by_a_kernel_that_drops_the_cap(tmp_path: Path) -> None:
    load_random("gemma2", path=tmp_path)
    assert load_model(LoadConfig(path=str(tmp_path))).model.config._attn_implementation == "eager"


def test_settings_are_checked(folder: Path) -> None:
    with pytest.raises(ConfigError, match="Unknown dtype"):
        LoadConfig(path="x", dtype="int3")
    with pytest.raises(ConfigError, match="Unknown device"):
        load_model(LoadConfig(path=str(folder), device="abacus"))


def broken(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "broken"))


def test_missing_and_broken_checkpoints_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such model folder"):
        load_model(LoadConfig(path=str(tmp_path / "nothing")))
    copy = broken(folder, tmp_path)
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_model(LoadConfig(path=str(copy)))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 parameters .*up_proj"):
        load_model(LoadConfig(path=str(copy)))
    weights.unlink()
    with pytest.raises(CheckpointError, match="Not a model folder"):
        load_model(LoadConfig(path=str(copy)))


def test_the_weights_hash_follows_weights_and_configuration_only(folder: Path, tmp_path: Path) -> None:
    copy = broken(folder, tmp_path)
    assert weights_hash(copy) == weights_hash(folder)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "transformers_version": "0"}))
    assert weights_hash(copy) == weights_hash(folder)
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1.0}))
    assert weights_hash(copy) != weights_hash(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    (copy / "config.json").write_text(json.dumps(config))
    assert weights_hash(copy) != weights_hash(folder)
    with pytest.raises(CheckpointError, match="No safetensors"):
        weights_hash(tmp_path)


def test_the_tokenizer_hash_survives_saving_and_use(folder: Path) -> None:
    tokenizer = build_tokenizer()
    before = tokenizer_hash(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=3)
    assert tokenizer_hash(tokenizer) == before == tokenizer_hash(load_model(LoadConfig(path=str(folder))).tokenizer)
    assert tokenizer_hash(build_tokenizer(adds_bos=False)) != before


def test_differences_between_tokenizers_are_named(folder: Path) -> None:
    baseline = load_model(LoadConfig(path=str(folder)))
    check_same_tokenizer(baseline, load_model(LoadConfig(path=str(folder))))

    def with_tokenizer(tokenizer: object) -> LoadedModel:
        return LoadedModel(baseline.model, tokenizer, folder, baseline.dtype, baseline.device)

    with pytest.raises(AlignmentError, match="differ in post_processor"):
        check_same_tokenizer(baseline, with_tokenizer(build_tokenizer(adds_bos=False)))
    more = build_tokenizer()
    more.add_tokens(["<extra>"])
    with pytest.raises(AlignmentError, match=r"1 tokens different ids, first '<extra>'"):
        check_same_tokenizer(baseline, with_tokenizer(more))
    config = CONFIGS["llama"]()
    config.vocab_size = 304
    wider = LoadedModel(build_model(config), baseline.tokenizer, folder, baseline.dtype, baseline.device)
    with pytest.raises(AlignmentError, match="different widths"):
        check_same_tokenizer(baseline, wider)
