"""Dropped layers: the right ones go, and what is left is a plain model."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mlflow_compress.compression import compress_model, method_config
from mlflow_compress.compression.methods.layer_drop import block_distances
from mlflow_compress.errors import ConfigError
from tests.compress_models import TEXT, logits, make_llama, make_neox, make_qwen2, token_rows

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_fresh_process")]

SETTINGS = {"calibration_samples": 4, "calibration_length": 64}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, the second of which does nothing."""
    folder = make_llama(tmp_path_factory.mktemp("base") / "llama", num_hidden_layers=4)
    model = AutoModelForCausalLM.from_pretrained(folder)
    idle = model.model.layers[1]
    for weight in (idle.self_attn.o_proj.weight, idle.mlp.down_proj.weight):
        weight.data.zero_()
    model.save_pretrained(folder)
    return folder


def dropped(folder: Path) -> list[int]:
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 4 - len(config["dropped_layers"])
    return config["dropped_layers"]


def test_the_last_layers_go(base: Path, tmp_path: Path) -> None:
    manifest = compress_model(str(base), "layer-drop", method_config("layer-drop", layers=2), [], tmp_path / "out")
    assert dropped(tmp_path / "out") == [2, 3] and manifest.label == "layer-drop-2"
    assert manifest.bits_per_weight == 8.0  # half of the layers, 16 bits each
    ids = token_rows(base, TEXT[0], rows=2, length=64)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    model.model.layers = model.model.layers[:2]
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids).logits, logits(tmp_path / "out", ids))


def test_the_layer_that_turns_nothing_goes_first_and_is_not_missed(base: Path, tmp_path: Path) -> None:
    config = method_config("layer-drop-angular", layers=1, **SETTINGS)
    compress_model(str(base), "layer-drop-angular", config, TEXT, tmp_path / "out")
    assert dropped(tmp_path / "out") == [1]
    ids = token_rows(base, TEXT[0], rows=2, length=64)
    assert torch.equal(logits(base, ids), logits(tmp_path / "out", ids))
    # Keys and values of the layers that stay are cached in their new places.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    model.generate(ids[:1, :8], max_new_tokens=4, do_sample=False, pad_token_id=0)


def test_distances_are_angles_of_whole_blocks() -> None:
    half, right = math.sqrt(0.5), [0.0, 1.0]
    states = torch.tensor([[[1.0, 0.0]], [[half, half]], [[2.0, 2.0]], [right]], dtype=torch.float64)
    # A cosine c that is rounded by 2⁻⁵² moves arccos(c) by up to sqrt(2 x 2⁻⁵²) near c = 1; divided by pi.
    assert block_distances(states, 1).tolist() == pytest.approx([0.25, 0.0, 0.25], abs=2**-25)
    assert block_distances(states, 2).tolist() == pytest.approx([0.25, 0.25])
    assert block_distances(states, 3).tolist() == pytest.approx([0.5])


def test_settings_that_are_told_layer_by_layer_are_shortened_too(tmp_path: Path) -> None:
    base = make_qwen2(tmp_path / "qwen2", num_hidden_layers=3)
    compress_model(str(base), "layer-drop", None, [], tmp_path / "out")
    assert len(json.loads((tmp_path / "out" / "config.json").read_text())["layer_types"]) == 2


@pytest.mark.parametrize("method", ["layer-drop", "layer-drop-angular"])
def test_dropping_nothing_or_everything_is_refused(method: str, base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'layers' is too small"):
        method_config(method, layers=0)
    settings = SETTINGS if method == "layer-drop-angular" else {}
    with pytest.raises(ConfigError, match=r"Allowed: 1 to 1\. Got: 2"):
        neox = make_neox(tmp_path / "neox")
        compress_model(str(neox), method, method_config(method, layers=2, **settings), TEXT, tmp_path / "out")
