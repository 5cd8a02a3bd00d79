"""Wanda's mask and SmoothQuant's factors against a few lines that follow the papers, on a small random model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mlflow_compress.compression import calibration_tokens, compress_model, method_config
from mlflow_compress.compression.methods.gguf_k import mean_squares
from mlflow_compress.models.source_model import resolve
from tests.compress_models import TEXT, make_llama
from tests.unit.scoring_models import U

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_fresh_process")]
SETTINGS = {"calibration_samples": 4, "calibration_length": 64}


def compressed(tmp_path: Path, method: str, **settings: object) -> tuple[Path, Path, calibration_tokens.Calibration]:
    """Compress a random float32 model; return base, variant and what it was calibrated with."""
    base, out = make_llama(tmp_path / "base", dtype=torch.float32), tmp_path / "out"
    compress_model(str(base), method, method_config(method, **SETTINGS, **settings), TEXT, out)
    tokenizer = resolve(str(base)).tokenizer()
    return base, out, calibration_tokens.prepare_calibration(tokenizer, TEXT, samples=4, length=64, seed=0)


def test_wanda_zeroes_the_smallest_weights_times_input_norms_of_each_row(tmp_path: Path) -> None:
    base, out, tokens = compressed(tmp_path, "wanda", sparsity=0.5)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    names, stored = list(resolve(str(base)).linear), load_file(out / "model.safetensors")
    for layer in ("layers.0.", "layers.1."):  # the second sees the outputs of the pruned first
        inside = [name for name in names if layer in name]
        squares, _ = mean_squares(model, inside, tokens)
        for name in inside:
            weight = model.get_submodule(name).weight.data
            order = (weight.abs() * squares[name].float().sqrt()).argsort(dim=1)
            weight.scatter_(1, order[:, : weight.shape[1] // 2], 0.0)
            assert torch.equal(stored[f"{name}.weight"], weight), name


def test_smoothquant_divides_norms_by_the_published_factor(tmp_path: Path) -> None:
    alpha = 0.7
    base, out, tokens = compressed(tmp_path, "smoothquant", alpha=alpha)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    stored = load_file(out / "model.safetensors")
    attention, norm = model.model.layers[0].self_attn, model.model.layers[0].input_layernorm
    inputs: list[torch.Tensor] = []
    norm.register_forward_hook(lambda _, __, output: inputs.append(output.flatten(0, 1)))
    with torch.inference_mode():
        for batch in tokens.loader():
            model(input_ids=batch["input_ids"])
    states = torch.cat(inputs)
    weights = torch.cat([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
    factor = states.abs().amax(0) ** alpha / weights.abs().amax(0) ** (1 - alpha)
    # A state is the norm of 64 terms; it, its power, the weights', their quotient and the last one round, by a few U each.
    stored_norm = stored["model.layers.0.input_layernorm.weight"]
    assert torch.allclose(stored_norm, norm.weight / factor, rtol=(64 + 16) * U, atol=0)
    # Folded into the weights: a level is a step of the row's largest magnitude, 127 to either side.
    scaled = attention.q_proj.weight * factor
    levels = scaled / (scaled.abs().amax(1, keepdim=True) / 127.5)
    found = stored["model.layers.0.self_attn.q_proj.weight"].float()
    assert float((levels - found).abs().max()) < 0.6  # rounding, and the scale's own
