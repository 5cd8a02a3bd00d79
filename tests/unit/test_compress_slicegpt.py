"""SliceGPT: nothing changes at 0 %, nothing is lost where nothing was, and the rest is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mlflow_compress.compression import compress_model, method_config
from mlflow_compress.compression.gguf_model import as_llama
from mlflow_compress.compression.methods.slicegpt import principal_directions, sliced
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models.loading import LoadConfig, load_model
from tests.compress_models import TEXT, logits, make_llama, make_mistral, make_qwen2, make_qwen3, mean_kl, token_rows
from tests.unit.scoring_models import kl_of_rounding, rounding_of

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_fresh_process")]

SETTINGS = {"calibration_samples": 4, "calibration_length": 64}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Biases and norms that are not all ones, in float32."""
    folder = tmp_path_factory.mktemp("base") / "llama"
    make_llama(folder, dtype=torch.float32, attention_bias=True, mlp_bias=True, num_hidden_layers=3)
    model = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def outputs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=ids).logits


def test_rotation_alone_changes_nothing(base: Path, tmp_path: Path) -> None:
    ids = token_rows(base, TEXT[0], rows=4, length=64)
    before = outputs(load(base), ids)
    after = outputs(sliced(load(base), [ids[:2], ids[2:]], 64), ids)
    # Weights are in float64, but Llama's own norm computes in float32.
    assert (before - after).abs().max() <= 2 * rounding_of(load(base), ids)
    kl = kl_of_rounding(load(base), ids)
    assert mean_kl(before, after) <= kl
    config = method_config("slicegpt", slicing=0, **SETTINGS)
    manifest = compress_model(str(base), "slicegpt", config, TEXT, tmp_path / "out")
    assert manifest.size_ratio < 1  # the shortcut matrices are counted
    assert mean_kl(logits(base, ids), logits(tmp_path / "out", ids)) <= kl


@pytest.mark.parametrize("make", [make_mistral, make_qwen2])
def test_relatives_of_llama_rotate_without_change(make: Any, tmp_path: Path) -> None:
    folder = make(tmp_path / "base", dtype=torch.float32)
    model = load(folder)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    ids = token_rows(folder, TEXT[0], rows=4, length=64)
    before = outputs(model, ids)
    llama = as_llama(model)
    assert type(llama).__name__ == "LlamaForCausalLM" and torch.equal(outputs(llama, ids), before)
    error, kl = rounding_of(llama, ids), kl_of_rounding(llama, ids)
    assert (before - outputs(sliced(llama, [ids], 64), ids)).abs().max() <= 2 * error
    compress_model(str(folder), "slicegpt", method_config("slicegpt", slicing=0, **SETTINGS), TEXT, tmp_path / "out")
    assert mean_kl(logits(folder, ids), logits(tmp_path / "out", ids)) <= kl


def test_what_carries_nothing_is_cut_without_loss(base: Path) -> None:
    model = load(base)
    generator = torch.Generator().manual_seed(2)
    basis = torch.linalg.qr(torch.randn(64, 48, generator=generator, dtype=torch.float64)).Q
    inside = basis @ basis.T  # the stream lies in 48 of its 64 dimensions
    model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data @ inside
    for layer in model.model.layers:
        for writer in (layer.self_attn.o_proj, layer.mlp.down_proj):
            writer.weight.data, writer.bias.data = inside @ writer.weight.data, inside @ writer.bias.data
    ids = token_rows(base, TEXT[0], rows=4, length=64)
    before, kl = outputs(model, ids), kl_of_rounding(model, ids)
    cut = sliced(model, [ids], 48)
    assert cut.model.layers[0].self_attn.q_proj.weight.shape == (64, 48)
    assert mean_kl(before, outputs(cut, ids)) <= kl


def test_components_are_sorted_and_orthonormal() -> None:
    states = torch.randn(2, 100, 8, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 9)
    basis = principal_directions([states[:1], states[1:]])
    torch.testing.assert_close(basis.T @ basis, torch.eye(8, dtype=torch.float64))
    energy = (states.double() @ basis).square().sum((0, 1))
    assert energy.tolist() == sorted(energy.tolist(), reverse=True)


def test_deeper_cuts_move_farther_and_weigh_less_and_the_model_generates(base: Path, tmp_path: Path) -> None:
    ids = token_rows(base, TEXT[0], rows=4, length=64)
    before, distances, sizes = logits(base, ids), [], []
    for slicing in (0.25, 0.5):
        out = tmp_path / str(slicing)
        config = method_config("slicegpt", slicing=slicing, **SETTINGS)
        sizes.append(compress_model(str(base), "slicegpt", config, TEXT, out).size_bytes)
        distances.append(mean_kl(before, logits(out, ids)))
    assert 0 < distances[0] < distances[1] and sizes[0] > sizes[1]
    loaded = load_model(LoadConfig(path=str(tmp_path / "0.5"), device="cpu"))
    assert loaded.model.generate(ids[:1, :8], max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (1, 12)


def test_what_cannot_be_sliced_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"Allowed: LlamaForCausalLM, .*Got: 'Qwen3ForCausalLM'"):
        qwen = make_qwen3(tmp_path / "qwen3")
        compress_model(str(qwen), "slicegpt", method_config("slicegpt", **SETTINGS), TEXT, tmp_path / "out")
    with pytest.raises(UnsupportedError, match="Sliding-window"):
        windows = make_mistral(tmp_path / "windows", sliding_window=32)
        compress_model(str(windows), "slicegpt", method_config("slicegpt", **SETTINGS), TEXT, tmp_path / "out")
    for slicing in (1, -0.1):
        with pytest.raises(ConfigError, match=r"'slicing' is too (large. Allowed: below 1|small. Allowed: 0)"):
            method_config("slicegpt", slicing=slicing)
    config = method_config("slicegpt", slicing=0.9, round_to=16, **SETTINGS)
    with pytest.raises(ConfigError, match="leaves nothing of 64 channels in multiples of 16"):
        compress_model(str(base), "slicegpt", config, TEXT, tmp_path / "out")
