"""Opening checkpoints: what is refused, and whose weights and tokenizer these are.

What decides a model's numbers besides its weights: found without loading anything, and changed by what matters.

A model known from its files says of itself what the loaded model says, and no weight is loaded.
"""

import json
import shutil
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from safetensors.torch import load_file, save_file

from mlflow_compress import demo
from mlflow_compress.errors import AlignmentError, CheckpointError, ConfigError, StoreError
from mlflow_compress.models.architectures.packed_layers import dequantized, unpacked
from mlflow_compress.models.identity import check_same_tokenizer, tokenizer_hash, weights_hash
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model, open_light
from mlflow_compress.scoring import engine_identity as module
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.engine_identity import engine_identity
from tests.unit.scoring_models import CONFIGS, build_model, build_tokenizer, load_random, mixed_requests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    load_random("llama", path=path)
    return path


def test_a_saved_model_comes_back_and_settings_are_checked(folder: Path) -> None:
    loaded = load_model(LoadConfig(path=str(folder)))
    assert loaded.dtype == torch.float32
    assert not loaded.model.training
    assert (loaded.vocab_size, loaded.max_length) == (300, 160)
    half = load_model(LoadConfig(path=str(folder), dtype="bfloat16", device="cpu"))
    assert half.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="Unknown dtype"):
        LoadConfig(path="x", dtype="int3")
    with pytest.raises(ConfigError, match="Unknown device"):
        load_model(LoadConfig(path=str(folder), device="abacus"))


def test_soft_capped_attention_is_not_run_by_a_kernel_that_drops_the_cap(tmp_path: Path) -> None:
    load_random("gemma2", path=tmp_path)
    assert load_model(LoadConfig(path=str(tmp_path))).model.config._attn_implementation == "eager"


def broken(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "broken"))


@pytest.mark.parametrize("num_bits", range(1, 9))
def test_packed_weights_are_unpacked_as_their_own_library_does(num_bits: int) -> None:
    top = 1 << (num_bits - 1)
    for columns in (1, 7, 32, 33, 160):  # words, and parts of one
        values = torch.randint(
            -top, top, (3, columns), dtype=torch.int8, generator=torch.Generator().manual_seed(columns)
        )
        packed = pack_to_int32(values, num_bits)
        assert torch.equal(unpacked(packed, num_bits, values.shape, others=unpack_from_int32), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn, torch.float32])
def test_weights_are_dequantized_as_their_own_library_does(stored: torch.dtype, dtype: torch.dtype) -> None:
    own = import_module("compressed_tensors.quantization.lifecycle.forward_helpers")._dequantize
    draw = torch.Generator().manual_seed(0)
    values = torch.randint(-8, 8, (5, 6, 32), generator=draw).to(stored)
    before, scale = values.clone(), torch.rand((5, 6, 1), generator=draw).to(dtype)
    zero_point, global_scale = torch.randint(-8, 8, (5, 6, 1), generator=draw), torch.tensor([3.7])
    for parts in ((None,), (zero_point,), (zero_point, torch.float16), (zero_point, torch.float32, global_scale)):
        assert torch.equal(dequantized(values, scale, *parts), own(values, scale, *parts))
    assert torch.equal(values, before)


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


def with_config(folder: Path, **settings: object) -> Path:
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_the_engine_is_its_version_and_its_libraries(tmp_path: Path) -> None:
    found = engine_identity(with_config(tmp_path, model_type="llama"))
    assert set(found) == {"scoring", "attention", *module.PACKAGES}
    assert found["scoring"] == str(module.SCORING_VERSION)
    assert {name: found[name] for name in module.PACKAGES} == {name: version(name) for name in module.PACKAGES}
    assert found["attention"] == "auto"
    assert engine_identity(with_config(tmp_path, attn_logit_softcapping=50.0))["attention"] == "eager"
    assert engine_identity(with_config(tmp_path, text_config={"attn_logit_softcapping": 9.0}))["attention"] == "eager"
    compressed = engine_identity(with_config(tmp_path, quantization_config={"quant_method": "compressed-tensors"}))
    assert compressed["compressed-tensors"] == version("compressed-tensors")
    assert "llama-cpp-python" in engine_identity(with_config(tmp_path, native_gguf=True))


def test_code_that_comes_with_a_checkpoint_decides_too(tmp_path: Path) -> None:
    with_config(tmp_path, model_type="own")
    (tmp_path / "modeling_own.py").write_text("A = 1")
    before = engine_identity(tmp_path)["model code"]
    (tmp_path / "modeling_own.py").write_text("A = 2")
    assert engine_identity(tmp_path)["model code"] != before


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
