"""Several formats in one checkpoint: every layer holds what its format's own method stores for it."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader

from mlflow_compress.compression import compress_model, method_config
from mlflow_compress.compression.gguf_model import MAX_NATIVE_KL
from mlflow_compress.compression.methods.mixed import RECIPE_FILE, MixedConfig
from mlflow_compress.compression.mixed_recipe import MixedRecipe, format_parts
from mlflow_compress.compression.probe import compare_logits
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models import gguf_file
from mlflow_compress.models.architectures.native_gguf import open_native
from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.models.source_model import resolve
from mlflow_compress.models.stored_weights import bytes_of_layers, read_headers
from mlflow_compress.paths import STARTED_IN
from tests.compress_models import TEXT, make_llama

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_fresh_process")]

CALIBRATION = {"calibration_samples": 4, "calibration_length": 64}
Made = Callable[..., Path]

needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="needs the extra 'llama-cpp'"
)


def described(text: str) -> dict[str, Any]:
    method, bits = format_parts(text)
    own = {"rtn": {"group_size": 32}, "gptq": {"group_size": 32}, "awq": {"group_size": 32}}.get(method, {})
    own = {"mix": "pure"} if method in ("gguf-k", "gguf-imatrix") else own
    return {"method": method, **own, **({} if bits == "auto" else {"bits": int(bits)})}


def written(base: Path, folder: Path, formats: list[str]) -> MixedRecipe:
    """Write a recipe that gives the layers of the model the formats in turn."""
    layers = {name: formats[i % len(formats)] for i, name in enumerate(resolve(str(base)).linear)}
    recipe = MixedRecipe(formats={f: described(f) for f in formats if f != "none"}, layers=layers)
    recipe.write(folder / "recipe.json")
    return recipe


def mixed(base: Path, folder: Path) -> Path:
    settings = method_config("mixed", recipe=str(folder / "recipe.json"), **CALIBRATION)
    compress_model(str(base), "mixed", settings, TEXT, folder / "out")
    return folder / "out"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model = load_model(LoadConfig(path=str(folder), device="cpu")).model
    return {n: m.weight.data for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}


@pytest.mark.parametrize(
    "formats", [["rtn:3", "rtn:8", "none"], ["gguf:4", "gguf:8"], ["rtn:2", "fp8"], ["mxfp4", "mxfp8", "none"]], ids=str
)
def test_a_layer_is_what_its_format_alone_makes_of_it(base: Path, tmp_path: Path, formats: list[str]) -> None:
    """Methods without data look at one layer at a time: values and bytes are those of the uniform checkpoints."""
    recipe = written(base, tmp_path, formats)
    out = mixed(base, tmp_path)
    found, headers = weights(out), read_headers(out)
    assert json.loads((out / RECIPE_FILE).read_text())["layers"] == recipe.layers
    for name in formats:
        uniform = base
        if name != "none":
            method, uniform = described(name)["method"], tmp_path / name.replace(":", "-")
            settings = {key: value for key, value in described(name).items() if key != "method"}
            compress_model(str(base), method, method_config(method, **settings), [], uniform)
        expected, sizes = weights(uniform), read_headers(uniform)
        for layer in recipe.layers_of(name):
            assert torch.equal(found[layer], expected[layer])
            assert bytes_of_layers(headers, [layer]) == bytes_of_layers(sizes, [layer])


@needs_llama_cpp
@pytest.mark.parametrize(
    "formats", [["gguf-k:3", "gguf:8", "none", "gguf-k:2"], ["gguf-imatrix:4", "gguf-k:6", "gguf:4"]], ids=str
)
def test_tensors_of_one_gguf_file_are_those_of_the_uniform_files(tmp_path: Path, formats: list[str]) -> None:
    """llama.cpp quantizes each tensor alone: type and bytes are those of the file in which all layers have its type."""
    base = make_llama(tmp_path / "base", hidden_size=256, intermediate_size=256, num_attention_heads=4)
    recipe = written(base, tmp_path, formats)
    out = mixed(base, tmp_path)
    names = [gguf_file.to_gguf_name(f"{n}.weight", architecture="llama", n_layers=2) for n in recipe.layers]
    by_layer = dict(zip(recipe.layers, names, strict=True))
    found = {tensor.name: tensor for tensor in GGUFReader(out / "model.gguf").tensors}
    for name in formats:
        if name == "none":
            kept = {found[by_layer[layer]].tensor_type.name for layer in recipe.layers_of(name)}
            assert kept == {"BF16"}  # the base's
            continue
        uniform, settings = tmp_path / name.replace(":", "-"), described(name)
        method = settings.pop("method")
        calibration = CALIBRATION if method == "gguf-imatrix" else {}
        compress_model(str(base), method, method_config(method, **settings, **calibration), TEXT, uniform)
        expected = {tensor.name: tensor for tensor in GGUFReader(uniform / "model.gguf").tensors}
        assert recipe.layers_of(name)
        for layer in recipe.layers_of(name):
            one, other = found[by_layer[layer]], expected[by_layer[layer]]
            assert one.tensor_type == other.tensor_type and np.array_equal(one.data, other.data)
    # llama.cpp loads the file, and computes the same within its own rounding of activations.
    ids = torch.arange(40).reshape(2, 20)
    with torch.inference_mode():
        native = open_native(out)(input_ids=ids).logits
        plain = load_model(LoadConfig(path=str(out), device="cpu")).model(input_ids=ids).logits
    assert compare_logits(plain.flatten(0, 1), native.flatten(0, 1)).kl_mean < MAX_NATIVE_KL


@needs_llama_cpp
def test_a_mix_of_types_is_no_format_of_single_layers(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", hidden_size=256, intermediate_size=256, num_attention_heads=4)
    recipe = written(base, tmp_path, ["gguf-k:3", "gguf:8"])
    recipe.formats["gguf-k:3"]["mix"] = "L"
    recipe.write(tmp_path / "recipe.json")
    with pytest.raises(ConfigError, match=r"cannot mix types. Allowed: mix=pure. Got: 'L'"):
        mixed(base, tmp_path)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_calibrated_methods_store_each_layer_in_its_bits(base: Path, tmp_path: Path, method: str) -> None:
    recipe = written(base, tmp_path, [f"{method}:3", f"{method}:8"])
    out = mixed(base, tmp_path)
    headers, shapes = read_headers(out), resolve(str(base)).linear
    for layer, chosen in recipe.layers.items():
        rows, columns = shapes[layer]
        assert headers[f"{layer}.weight_packed"].n_bytes == rows * columns * int(chosen[-1]) // 8
    groups = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]
    assert sorted(g["weights"]["num_bits"] for g in groups.values()) == [3, 8]


def test_the_identity_is_that_of_the_content(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(base, tmp_path, ["rtn:4", "rtn:8"]).write(tmp_path / "other.json")
    one, other = (MixedConfig(recipe=str(tmp_path / name)).settings() for name in ("recipe.json", "other.json"))
    assert one == other
    monkeypatch.setenv(STARTED_IN, str(tmp_path))  # a stage has another working folder
    assert MixedConfig(recipe="recipe.json").settings() == one
    written(base, tmp_path, ["rtn:8", "rtn:4"])
    assert MixedConfig(recipe=str(tmp_path / "recipe.json")).settings() != one


@pytest.mark.parametrize(
    ("formats", "error", "message"),
    [
        (["awq:4", "rtn:4"], UnsupportedError, "'awq' cannot share a checkpoint"),
        (["gguf:4", "rtn:4"], UnsupportedError, "'gguf' cannot share a checkpoint"),
        (["hqq:4", "rtn:4"], UnsupportedError, "'hqq' cannot be applied to some layers only.*gptq"),
        (["none"], ConfigError, "changes no layer"),
    ],
)
def test_formats_that_do_not_go_together_are_refused(
    base: Path, tmp_path: Path, formats: list[str], error: type[Exception], message: str
) -> None:
    written(base, tmp_path, formats)
    with pytest.raises(error, match=message):
        mixed(base, tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["layers"].pop("model.layers.0.mlp.up_proj"), "lacks layer.*up_proj"),
        (lambda r: r["layers"].update({"model.head": "rtn:4"}), "has an unknown layer.*model.head"),
        (lambda r: r["layers"].update({"model.layers.0.mlp.up_proj": "rtn:5"}), "does not describe a format.*rtn:5"),
        (lambda r: r["formats"].update({"rtn:4": {"bits": 4}}), "has no method"),
        (lambda r: r["formats"].update({"rtn:4": {"method": "rtn", "bits": 5}}), "does not support these bits"),
        (lambda r: r["formats"].update({"rtn:4": {"method": "rtn", "group_size": 48}}), "Group size 48"),
        (lambda r: r.pop("layers"), "lacks a field"),
    ],
)
def test_broken_recipes_are_refused(base: Path, tmp_path: Path, change: Callable[[Any], Any], message: str) -> None:
    written(base, tmp_path, ["rtn:4", "rtn:8"])
    content = json.loads((tmp_path / "recipe.json").read_text())
    change(content)
    (tmp_path / "recipe.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        mixed(base, tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_recipe_is_asked_for_and_settings_of_the_whole_recipe_cannot_differ(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a recipe"):
        compress_model(str(base), "mixed", MixedConfig(), TEXT, tmp_path / "out")
    recipe = written(base, tmp_path, ["gptq:4", "gptq:8"])
    recipe.formats["gptq:8"]["damping"] = 0.1
    recipe.write(tmp_path / "recipe.json")
    with pytest.raises(ConfigError, match=r"Formats of 'gptq' differ in more than bits.*0\.1"):
        mixed(base, tmp_path)
